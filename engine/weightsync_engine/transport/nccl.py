"""Steps over NCCL, between GPU memory of the ranks: as M2N reshards, or as grouped sends and receives.

Both run a step in three places at once: the share of the next step is packed while this one travels and the one
before it is unpacked. Streams order the work; the host waits only for a step's last event, with a deadline.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..layout.tensors import DTYPE_BYTES
from ..plan.plan import LocalStep
from ..plan.steps import Side, Step
from ..plan.validate import IN_FLIGHT, M2N, Envelope
from ..protocol.names import ENV_STEP_BYTES
from .base import LocalTensor, Transport
from .copies import copy_all
from .failure import Failure, PeerFailure
from .store import EpochStore

_cuda: Any = torch.cuda  # whose methods have no types

MIN_NCCL = (2, 30, 5)
"""Of M2N; below it the fast paths of one NVLink domain are missing."""
_UNIQUE_ID_BYTES = 128
_M2N_DTYPES = frozenset({"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
"""Those that M2N and NCCL move as they are; others travel as bytes."""
_SETTINGS = (
    "NCCL_RESHARD_",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MULTI_RANK_GPU_ENABLE",
    "NCCL_P2P_",
    "NCCL_NVLS_ENABLE",
)
"""Environment that must be equal on all ranks."""
_PACK_BUFFERS = "NCCL_RESHARD_PACK_BUFFSIZES"
_LEAST_PACK_BUFFER = 2048


@dataclass
class _Begun:
    step: LocalStep
    done: Any
    """Its last event."""
    bytes_moved: int


class _Nccl(Transport):
    """A communicator of `world` ranks, made from an id that rank 0 puts into the epoch's store."""

    collective = False
    depth = IN_FLIGHT
    check_bytes = 1 << 30

    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        core = _core(rank)
        self._rank, self._store = rank, store
        self._failed = False
        self._begun: deque[_Begun] = deque()
        if rank == 0:
            store.put("nccl", bytes(core.get_unique_id()))
        data = store.get("nccl", 0, deadline, "the communicator's id")
        if len(data) != _UNIQUE_ID_BYTES:
            raise Failure(
                "BadRendezvous", f"the communicator's id has {len(data)} bytes, not {_UNIQUE_ID_BYTES}", 0
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        try:
            # Blocks for as long as a peer is missing; whoever drives this process ends it at the deadline.
            self._comm = core.Communicator.init(world, rank, core.UniqueId.from_bytes(data))
        except Exception as e:
            raise PeerFailure(
                "ConnectFailed", f"rank {rank} could not join the communicator: {e}"[:1024], rank
            ) from e
        self._stream = _cuda.Stream(self._device)

    @staticmethod
    def runtime() -> dict[str, Any]:
        core = _core(None)
        version = core.get_version()
        return {
            "nccl": str(getattr(version.libnccl, "version", version.libnccl)),
            "nccl4py": str(version.nccl4py),
            **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
        }

    def finish(self, stall_seconds: float, moved: Callable[[int], None]) -> None:
        begun = self._begun.popleft()
        until = time.monotonic() + stall_seconds
        pause = 0.0
        while not begun.done.query():
            if time.monotonic() >= until:
                self._failed = True
                peers = begun.step.peers or tuple(begun.step.step.source.ranks)
                raise PeerFailure(
                    "PeerLate",
                    f"{self._store.step(begun.step.index)} did not end for {stall_seconds:.1f} s; "
                    f"{self._store.named(peers[0])} is one of {len(peers)} partners: its mover is frozen, starved or "
                    "cut off; "
                    "it is replaced when its pod's agent kills it",
                    peers[0],
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
        moved(begun.bytes_moved)

    def _lost(self, step: LocalStep, error: Exception) -> PeerFailure:
        self._failed = True
        peer = step.peers[0] if step.peers else self._rank
        return PeerFailure(
            "PeerLost",
            f"NCCL failed in {self._store.step(step.index)}; a new epoch tries again, NCCL_DEBUG=INFO tells more: "
            f"{error}"[:1024],
            peer,
        )

    def close(self) -> None:
        comm, self._comm = self._comm, None
        self._begun.clear()
        if comm is not None and not self.hopeless:
            comm.abort()  # local: no peer takes part


class P2PTransport(_Nccl):
    """Each part of a block goes straight from where it lies to where it belongs, in one group a step. Only parts that
    are no run of memory are copied through staging memory."""

    envelope = Envelope(max_local_bytes=1 << 30)

    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        super().__init__(store, rank, world, host, deadline)
        self._ready: dict[int, _Messages] = {}
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)

    def begin(self, step: LocalStep, local: LocalTensor) -> None:
        from nccl.core import group

        messages = self._ready.get(step.index)
        if messages is None:
            messages = self._ready[step.index] = _messages(step, local)
        try:
            with torch.cuda.stream(self._stream):
                staged = self._staged(messages.scattered)
                if step.sends and staged:
                    copy_all(staged, messages.scattered)
                with group():
                    for at, peers in messages.order:
                        data = messages.runs[at] if at >= 0 else staged[-1 - at].view(-1)
                        for peer in peers:
                            move = self._comm.send if step.sends else self._comm.recv
                            move(data.view(torch.uint8), peer, stream=self._stream)
                if not step.sends and staged:
                    copy_all(messages.scattered, staged)
        except PeerFailure:
            raise
        except Exception as e:
            raise self._lost(step, e) from e
        done = _cuda.Event()
        done.record(self._stream)
        self._begun.append(_Begun(step, done, _moved(step)))

    def _staged(self, scattered: list[torch.Tensor]) -> list[torch.Tensor]:
        """A packed place for each. The steps take the same memory in turns, for they run one after the other on one
        stream; so it is never more than a rank's share of one step."""
        sizes = [-(-r.numel() * r.element_size() // _ALIGNED) * _ALIGNED for r in scattered]
        if self._staging.numel() < sum(sizes):
            self._staging = self._staging.new_empty(0)
            torch.cuda.empty_cache()  # what was too small goes back first; waits for those that use it
            self._staging = self._staging.new_empty(sum(sizes))
        used: Any = self._staging[: sum(sizes)]  # whose split has no types
        return [
            place[: r.numel() * r.element_size()].view(r.dtype).view(r.shape)
            for place, r in zip(used.split(sizes), scattered, strict=True)
        ]

    def close(self) -> None:
        super().close()
        self._staging = self._staging.new_empty(0)


@dataclass
class _Messages:
    """The messages of one step, worked out once: regions of the slab do not move."""

    runs: list[torch.Tensor] = field(default_factory=list)
    """Flat views of those that are runs of memory."""
    scattered: list[torch.Tensor] = field(default_factory=list)
    order: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """(index among the runs, or -1 - index among the scattered ones; peers), in order."""


_ALIGNED = 512
"""Bytes at which a staged part begins, as those in slabs do."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies of several floating point tensors at once change the bits of NaNs."""
    return tensor.view(_BITS[tensor.element_size()])


def _messages(step: LocalStep, local: LocalTensor) -> _Messages:
    found = _Messages()
    for block in step.blocks:
        for part in block.parts:
            region = _bits(local(part))
            if region.is_contiguous():
                found.order.append((len(found.runs), block.peers))
                found.runs.append(region.reshape(-1))
            else:
                found.order.append((-1 - len(found.scattered), block.peers))
                found.scattered.append(region)
    return found


class M2NTransport(_Nccl):
    """Each step is one `nccl.m2n` reshard between contiguous buffers. A share that is one run of the slab travels from
    or to where it lies; any other is packed into, or unpacked from, staging memory beside the transfers."""

    envelope = M2N
    collective = True

    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        super().__init__(store, rank, world, host, deadline)
        from nccl import m2n

        self._m2n = m2n
        self._handle = m2n.init()
        self._copying = _cuda.Stream(self._device)
        self._buffers: list[_Buffer] = []
        self._turn = 0
        self._ready: dict[int, _Share] = {}
        self._meshes: dict[Side, Any] = {}

    @staticmethod
    def configure(envelope: Envelope) -> None:
        """M2N packs a share into a buffer of its own, of which it takes four of 2 GiB, one after the other with each
        new communicator, unless told otherwise: one of the size of a share is enough."""
        given = os.environ.setdefault(_PACK_BUFFERS, f"{max(envelope.max_local_bytes, _LEAST_PACK_BUFFER)}:1")
        largest = max(map(_bytes, given.split(",")))
        if largest < envelope.max_local_bytes:
            raise Failure(
                "BadSetting",
                f"{_PACK_BUFFERS}={given!r} has no buffer of {envelope.max_local_bytes} bytes, the most that a rank "
                f"holds of a step: leave it unset, enlarge it, or lower {ENV_STEP_BYTES}",
            )

    @property
    def hopeless(self) -> bool:
        # After a peer is lost inside a reshard, abort() never returns.
        return self._failed

    @staticmethod
    def runtime() -> dict[str, Any]:
        found = _Nccl.runtime()
        import importlib.metadata

        return {**found, "nccl-extensions": importlib.metadata.version("nccl-extensions")}

    def begin(self, step: LocalStep, local: LocalTensor) -> None:
        share = self._ready.get(step.index)
        if share is None:
            share = self._ready[step.index] = _share(step, local)
        buffer = None if share.run is not None or not step.blocks else self._buffer(step.local_bytes)
        done = _cuda.Event()
        try:
            if buffer is None:
                self._reshard(step, share.run)
                done.record(self._stream)
            elif step.sends:
                flat = buffer.memory[: step.local_bytes]
                self._copying.wait_event(buffer.free)
                with torch.cuda.stream(self._copying):
                    copy_all(share.within(flat), share.regions)
                self._stream.wait_stream(self._copying)
                self._reshard(step, flat)
                done.record(self._stream)
                buffer.free = done
            else:
                flat = buffer.memory[: step.local_bytes]
                self._stream.wait_event(buffer.free)
                self._reshard(step, flat)
                self._copying.wait_stream(self._stream)
                with torch.cuda.stream(self._copying):
                    copy_all(share.regions, share.within(flat))
                done.record(self._copying)
                buffer.free = done
        except PeerFailure:
            raise
        except Exception as e:
            raise self._lost(step, e) from e
        self._begun.append(_Begun(step, done, _moved(step)))

    def _buffer(self, size: int) -> _Buffer:
        """One of as many as steps may be in flight; which one is free again is told by its event."""
        at = self._turn % self.depth
        self._turn += 1
        while len(self._buffers) <= at:
            self._buffers.append(_Buffer(torch.empty(0, dtype=torch.uint8, device=self._device)))
        if self._buffers[at].memory.numel() < size:
            self._buffers[at].free.synchronize()
            self._buffers[at].memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[at]

    def _reshard(self, own: LocalStep, flat: torch.Tensor | None) -> None:
        step = own.step
        dtype, scale = step.dtype, 1
        if dtype not in _M2N_DTYPES:
            dtype, scale = "uint8", DTYPE_BYTES[dtype]
        shapes = [_local_shape(step, side, scale) for side in (step.source, step.target)]
        share = (
            flat.view(getattr(torch, dtype)).view(shapes[0 if own.sends else 1]) if flat is not None else None
        )
        self._m2n.reshard(
            share if own.sends else None,
            None if own.sends else share,
            self._comm,
            self._stream,
            src_mesh=self._mesh(step.source),
            src_placements=_placements(step.source),
            src_local_shape=shapes[0],
            src_dtype=dtype,
            dst_mesh=self._mesh(step.target),
            dst_placements=_placements(step.target),
            dst_local_shape=shapes[1],
            dst_dtype=dtype,
            handle=self._handle,
        )

    def _mesh(self, side: Side) -> Any:
        if side not in self._meshes:
            self._meshes[side] = self._m2n.Mesh(side.mesh, side.first_rank)
        return self._meshes[side]

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None and not self._failed:
            torch.cuda.synchronize(self._device)
            handle.destroy()
        super().close()
        self._buffers.clear()


def _bytes(buffer: str) -> int:
    """Of one entry of `NCCL_RESHARD_PACK_BUFFSIZES`, such as 268435456, 256m:2; 0 if it is none."""
    size, _, _ = buffer.strip().lower().partition(":")
    unit = {"k": 1 << 10, "m": 1 << 20}.get(size[-1:], 1)
    digits = size if unit == 1 else size[:-1]
    return int(digits) * unit if digits.isdecimal() else 0


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: Any = field(default_factory=_cuda.Event)
    """Of the last work that used it; one that was never recorded counts as done."""


@dataclass
class _Share:
    """A rank's share of one step, worked out once."""

    run: torch.Tensor | None
    """Its bytes, where it is one run of the slab."""
    regions: list[torch.Tensor]
    """Otherwise what it consists of, in order."""

    def within(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The same in a packed buffer of bytes."""
        views: list[torch.Tensor] = []
        at = 0
        for region in self.regions:
            size = region.numel() * region.element_size()
            views.append(flat[at : at + size].view(region.dtype).view(region.shape))
            at += size
        return views


def _share(step: LocalStep, local: LocalTensor) -> _Share:
    regions = [_bits(local(part)) for block in step.blocks for part in block.parts]
    merged: list[torch.Tensor] = []
    for region in regions:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.is_contiguous()
            and region.is_contiguous()
            and last.untyped_storage().data_ptr() == region.untyped_storage().data_ptr()
            and last.data_ptr() + last.numel() * last.element_size() == region.data_ptr()
        ):
            flat = last.new_empty(0)
            merged[-1] = flat.set_(
                last.untyped_storage(), last.storage_offset(), (last.numel() + region.numel(),), (1,)
            )
        else:
            merged.append(region.reshape(-1) if region.is_contiguous() else region)
    alone = merged[0] if len(merged) == 1 and merged[0].is_contiguous() else None
    return _Share(alone.view(torch.uint8) if alone is not None else None, merged)


def _local_shape(step: Step, side: Side, scale: int) -> tuple[int, ...]:
    shape = list(step.shape)
    shape[side.axis] //= side.shards
    shape[-1] *= scale
    return tuple(shape)


def _placements(side: Side) -> tuple[Any, ...]:
    from nccl.m2n import Replicate, Shard

    return tuple(Shard(p.dim) if hasattr(p, "dim") else Replicate() for p in side.placements)


def _moved(step: LocalStep) -> int:
    return step.local_bytes * (step.step.target.copies if step.sends else 1)


def _core(rank: int | None) -> Any:
    """The NCCL library's own Python. Raises `Failure` with what to install."""
    try:
        from nccl import core, m2n  # noqa: F401

        loaded = core.get_version().libnccl
    except Exception as e:
        raise Failure(
            "NoNccl",
            f"NCCL M2N cannot be loaded ({type(e).__name__}: {str(e)[:200]}): install weightsync[cuda], and "
            f"nvidia-nccl-cu13 (or -cu12, as torch's CUDA) of at least {'.'.join(map(str, MIN_NCCL))}",
            rank,
        ) from e
    version = getattr(loaded, "version", None)
    release = tuple(getattr(version, "release", None) or ())
    if not release or release < MIN_NCCL:
        raise Failure(
            "OldNccl",
            f"the NCCL that this process has loaded is {version}, M2N needs {'.'.join(map(str, MIN_NCCL))}: torch "
            "brings an older one; install a newer nvidia-nccl wheel, and let it be loaded first (LD_PRELOAD)",
            rank,
        )
    return core
