"""The slab: one block of memory that a parent allocates and its mover maps.

A header page of fixed form in a memfd, then the payload: host memory in the same memfd, or device memory that
the header names (device by UUID, CUDA IPC handle, offset: bytes of fixed length, nothing that is executed).

The header carries a stamp (which version the payload holds) guarded by a seqlock: one writer at a time (trainer:
the parent; worker: the mover), readers in any process never block and never see a stamp of a payload that is
being written. The lock counts up, odd while the host writes or enqueues copies; a second word, `done`, follows it
once the payload is whole. On a GPU `done` is written by the stream that copies, after the copies, so nobody waits:
`stamp_after_copies` returns at once, and the stamp shows when the last byte is there. The lock changes before the
first copy is enqueued; so whoever reads the same stamp before its own reads began and after they have ended (its
streams waited for) has read nothing of another version, on a GPU as on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import math
import mmap
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterable

import torch

from ..layout.kinds import slab_order
from ..layout.tensors import DTYPE_BYTES, SlabTensor
from ..protocol.messages import Published
from . import cuda

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
ALIGNMENT = 256

_MAGIC = int.from_bytes(b"wsslab02", "little")
_HOST_MEMORY, _CUDA_MEMORY = 1, 2
# Header words of 8 bytes: magic, kind of memory, payload bytes, seqlock, sequence, length of the version,
# its crc32, the last lock of which the payload is whole.
_W_MAGIC, _W_KIND, _W_PAYLOAD, _W_LOCK, _W_SEQUENCE, _W_LENGTH, _W_CRC, _W_DONE = range(8)
_VERSION_AT = 128
_VERSION_MAX = 256
_DEVICE_AT = 512
_DEVICE = struct.Struct(f"<{cuda.UUID_BYTES}s{cuda.HANDLE_BYTES}sQQ")
"""UUID, CUDA IPC handle, offset of the payload in what the handle maps, bytes from there to its end."""
_DRAIN_SECONDS = 5.0
_left_behind: list[object] = []
"""Mappings that a stuck stream may still write to: kept until the process ends."""


class SlabError(ValueError):
    """A slab that cannot be made, mapped or read as asked; says what is wrong and where."""


def plan_slab(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[dict[str, SlabTensor], int]:
    """Lay out named tensors (name, shape, dtype), each aligned to 256 bytes, those of one kind, dtype and shape one
    after the other.

    Returns where each one is and the payload bytes to create, whatever order they come in. Raises `SlabError` for a
    repeated name, an unknown dtype or a negative extent. Tensors without elements get a place of zero bytes.
    """
    places: dict[str, SlabTensor] = {}
    offset = 0
    for name, shape, dtype in sorted(tensors, key=slab_order):
        if name in places:
            raise SlabError(f"slab tensor {name!r} is given twice")
        if dtype not in DTYPE_BYTES:
            raise SlabError(
                f"slab tensor {name!r}: dtype {dtype!r} cannot travel; known: {', '.join(DTYPE_BYTES)}"
            )
        if any(n < 0 for n in shape):
            raise SlabError(f"slab tensor {name!r}: shape {shape} has a negative extent")
        places[name] = SlabTensor(offset, tuple(shape), dtype)
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return places, offset


class Slab:
    """Header page and payload, mapped. Make one with `create` (owner) or `attach` (mover); end with
    `close`."""

    def __init__(
        self,
        fd: int,
        payload_bytes: int,
        mapping: mmap.mmap,
        device: cuda.Device | None,
        payload: torch.Tensor,
    ) -> None:
        self._fd = fd
        self.payload_bytes = payload_bytes
        self._words = memoryview(mapping)[:HEADER_BYTES].cast("Q")
        self._bytes = memoryview(mapping)[:HEADER_BYTES]
        self.gpu = device
        """Where the payload is, if it is not host memory."""
        # It keeps its memory for as long as any view of it lives, beyond close() too.
        self._payload = payload
        self._fence = threading.Lock()
        self._word_for_gpu = 0
        self._last_write = [0]
        """The last value of `done` that a stream was told to write."""
        self._unregister: weakref.finalize[..., Slab] | None = None

    @classmethod
    def create(cls, payload_bytes: int, device: torch.device | str = "cpu") -> Slab:
        """A new slab of zeros, never stamped. Its memory is taken now, so that lack of it shows here.

        Raises `SlabError` in bytes for a lack of memory, and where a GPU's memory cannot be shared.
        """
        if payload_bytes < 0:
            raise SlabError(f"a slab cannot have {payload_bytes} bytes")
        place = torch.device(device)
        if place.type not in ("cpu", "cuda"):
            raise SlabError(f"a slab cannot be on {place}: only host memory and CUDA devices are supported")
        on_gpu = place.type == "cuda"
        gpu, memory, named = _device_memory(payload_bytes, place) if on_gpu else (None, None, b"")
        size = HEADER_BYTES + (0 if on_gpu else payload_bytes)
        fd = os.memfd_create("weightsync-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as e:
                raise SlabError(
                    f"no memory for a slab of {size} bytes: {e.strerror}; give the pod more memory"
                ) from e
            # Nobody can shrink it under a reader, who would die of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, size)
            if gpu is None or memory is None:
                payload = torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:]
            else:
                payload = gpu.tensor(memory)[:payload_bytes]
                payload.zero_()
                gpu.synchronise_stream()
        except BaseException:
            os.close(fd)
            raise
        slab = cls(fd, payload_bytes, mapping, gpu, payload)
        slab._words[_W_KIND] = _CUDA_MEMORY if on_gpu else _HOST_MEMORY
        slab._words[_W_PAYLOAD] = payload_bytes
        slab._bytes[_DEVICE_AT : _DEVICE_AT + len(named)] = named
        slab._words[_W_MAGIC] = _MAGIC
        if gpu is not None:
            slab._let_gpu_write(gpu, mapping)
        return slab

    @classmethod
    def attach(cls, fd: int) -> Slab:
        """Map a slab that another process created, through its descriptor. Takes the descriptor over."""
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise SlabError(f"descriptor {fd} holds {size} bytes: less than a slab's header")
        mapping = mmap.mmap(fd, size)
        words = memoryview(mapping)[:HEADER_BYTES].cast("Q")
        if words[_W_MAGIC] != _MAGIC:
            raise SlabError(f"descriptor {fd} holds no slab of this version of weightsync")
        if words[_W_KIND] == _CUDA_MEMORY:
            if size != HEADER_BYTES:
                raise SlabError(f"a slab on a GPU has {size} bytes of host memory, not {HEADER_BYTES}")
            gpu, payload = _mapped(mapping[_DEVICE_AT : _DEVICE_AT + _DEVICE.size], words[_W_PAYLOAD])
            return cls(fd, words[_W_PAYLOAD], mapping, gpu, payload)
        if words[_W_KIND] != _HOST_MEMORY:
            raise SlabError(
                f"descriptor {fd} holds a slab in memory of kind {words[_W_KIND]}, unknown to this build"
            )
        if words[_W_PAYLOAD] != size - HEADER_BYTES:
            raise SlabError(f"slab of {size} bytes says it carries {words[_W_PAYLOAD]} bytes of payload")
        payload = torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:]
        return cls(fd, size - HEADER_BYTES, mapping, None, payload)

    def _let_gpu_write(self, gpu: cuda.Device, mapping: mmap.mmap) -> None:
        """Register the header, so that a stream can write `done`. Where it cannot, stamps wait for the stream."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        base = 0
        try:
            base = gpu.register(address, HEADER_BYTES)
            if base:  # a trial: what a driver says that it can and what it does are two things
                gpu.write_after_stream(base + 8 * _W_DONE, 0)
                gpu.synchronise_stream()
        except cuda.CudaError as e:
            log.warning(
                "every publish waits for its copies: the GPU cannot write to the slab's header: %s", e
            )
            if base:
                gpu.unregister(address)
            return
        if not base:
            log.warning("every publish waits for its copies: this GPU's streams cannot write words")
            return
        self._word_for_gpu = base + 8 * _W_DONE
        held = (mapping, self._payload)
        self._unregister = weakref.finalize(
            self, _unregister, gpu, address, self._last_write, held, os.getpid()
        )
        self._unregister.atexit = False

    @property
    def fd(self) -> int:
        """The descriptor to hand to a child process."""
        if self._fd < 0:
            raise SlabError("the slab is closed")
        return self._fd

    @property
    def device(self) -> torch.device:
        return self._payload.device

    def tensor(self, place: SlabTensor) -> torch.Tensor:
        """The tensor at that place: a contiguous view of the slab, not a copy. Raises `SlabError` if it is
        outside."""
        if self._fd < 0:
            raise SlabError("the slab is closed")
        if place.dtype not in DTYPE_BYTES:
            raise SlabError(f"dtype {place.dtype!r} cannot travel; known: {', '.join(DTYPE_BYTES)}")
        size = math.prod(place.shape) * DTYPE_BYTES[place.dtype]
        if (
            place.offset < 0
            or place.offset % DTYPE_BYTES[place.dtype]
            or place.offset + size > self.payload_bytes
        ):
            raise SlabError(f"{place} does not lie aligned inside a slab of {self.payload_bytes} bytes")
        dtype: torch.dtype = getattr(torch, place.dtype)
        if size == 0:
            return torch.empty(place.shape, dtype=dtype, device=self.device)
        return self._payload[place.offset : place.offset + size].view(dtype).view(place.shape)

    # -- stamp -----------------------------------------------------------------------------------------------

    def begin_write(self) -> None:
        """From here until `stamp`, the payload is of no version. Also after a writer that died halfway."""
        self._words[_W_LOCK] = (self._words[_W_LOCK] + 2) | 1
        self._order()

    def stamp(self, version: str, sequence: int) -> None:
        """The payload holds `version` now, wholly: on a GPU, the writer has waited for its streams. Raises
        `SlabError` without a `begin_write` before."""
        self._stamp(version, sequence, in_order=False)

    def stamp_after_copies(self, version: str, sequence: int) -> None:
        """The payload holds `version` once all that is on the current stream has ended; returns at once.

        Raises `SlabError` without a `begin_write` before.
        """
        self._stamp(version, sequence, in_order=True)

    def _stamp(self, version: str, sequence: int, in_order: bool) -> None:
        text = version.encode()
        if not 0 < len(text) <= _VERSION_MAX:
            raise SlabError(f"version {version!r} must have 1 to {_VERSION_MAX} bytes")
        lock = self._words[_W_LOCK]
        if not lock & 1:
            raise SlabError(f"stamp of {version!r} without begin_write")
        self._bytes[_VERSION_AT : _VERSION_AT + len(text)] = text
        self._words[_W_LENGTH] = len(text)
        self._words[_W_SEQUENCE] = sequence
        self._words[_W_CRC] = zlib.crc32(text, sequence & 0xFFFFFFFF)
        self._order()
        self._words[_W_LOCK] = lock + 1
        self._order()
        if not in_order:
            self._words[_W_DONE] = lock + 1
        elif self._word_for_gpu and self.gpu is not None:
            self._last_write[0] = lock + 1
            self.gpu.write_after_stream(self._word_for_gpu, lock + 1)
        else:
            if self.gpu is not None:
                self.gpu.synchronise_stream()
            self._words[_W_DONE] = lock + 1

    def read_stamp(self) -> Published | None:
        """What the payload holds, or None: never written, or being written. Never blocks."""
        for _ in range(16):
            before = self._words[_W_LOCK]
            if before == 0 or before & 1 or self._words[_W_DONE] != before:
                return None
            self._order()
            length, sequence, crc = self._words[_W_LENGTH], self._words[_W_SEQUENCE], self._words[_W_CRC]
            text = bytes(self._bytes[_VERSION_AT : _VERSION_AT + min(length, _VERSION_MAX)])
            self._order()
            if self._words[_W_LOCK] == before and zlib.crc32(text, sequence & 0xFFFFFFFF) == crc:
                return Published(version=text.decode(), sequence=sequence)
        return None

    @property
    def count(self) -> int:
        """Grows with every begin and every end of a write: the same number means the same payload."""
        return int(self._words[_W_LOCK])

    @property
    def copying(self) -> bool:
        """A stream has copies to end before the stamp shows. False also for a writer that died halfway."""
        lock = self._words[_W_LOCK]
        return lock != 0 and not lock & 1 and self._words[_W_DONE] != lock

    def wait_stamp(self, seconds: float) -> Published | None:
        """`read_stamp`, waiting at most so long for a stream that copies; nothing else is waited for."""
        deadline = time.monotonic() + seconds
        while (stamp := self.read_stamp()) is None and self.copying and time.monotonic() < deadline:
            time.sleep(0.0005)
        return stamp

    def _order(self) -> None:
        # A lock taken and released orders memory on processors that reorder; its cost is nothing here.
        with self._fence:
            pass

    def close(self) -> None:
        """Give up the descriptor and the header. Views handed out stay valid and keep the memory;
        idempotent."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if self._unregister is not None:
            self._unregister()
        self._words.release()
        self._bytes.release()
        self._payload = torch.empty(0, dtype=torch.uint8)


def _device_memory(size: int, place: torch.device) -> tuple[cuda.Device, cuda.Memory, bytes]:
    """Exportable memory on a GPU, and how the header names it."""
    try:
        gpu = cuda.open_device(place)
    except (OSError, RuntimeError) as e:
        raise SlabError(f"no slab on {place}: {e}") from e
    if gpu.memory()[0] < size:
        gpu.drop_cached()
    try:
        memory = gpu.allocate(size)
    except MemoryError as e:
        free, total = gpu.memory()
        raise SlabError(
            f"no memory for a slab of {size} bytes on {place} ({gpu.name}): {free} of {total} bytes are free, "
            f"{gpu.cached_bytes()} more are held unused by torch in this process"
        ) from e
    try:
        handle, offset = gpu.export(memory)
    except cuda.CudaError as e:
        raise SlabError(
            f"memory of {place} ({gpu.name}) cannot be shared with the mover: {e}. CUDA IPC is needed: it does not "
            "work under WSL, on most virtual GPUs and in confidential computing; containers need one IPC and PID "
            "namespace for parent and mover, which share a container here"
        ) from e
    return gpu, memory, _DEVICE.pack(gpu.uuid, handle, offset, memory.size)


def _mapped(named: bytes, payload_bytes: int) -> tuple[cuda.Device, torch.Tensor]:
    """The device memory that a header names, mapped into this process."""
    uuid, handle, offset, size = _DEVICE.unpack(named)
    if payload_bytes > size:
        raise SlabError(
            f"a slab says it carries {payload_bytes} bytes of payload in {size} bytes of device memory"
        )
    try:
        gpu = cuda.find_device(uuid)
        memory = gpu.map(handle, offset + size)
    except (OSError, LookupError, RuntimeError) as e:
        raise SlabError(f"the slab's device memory cannot be mapped: {e}") from e
    return gpu, gpu.tensor(memory)[offset : offset + payload_bytes]


def _unregister(
    gpu: cuda.Device, address: int, last_write: list[int], held: tuple[mmap.mmap, torch.Tensor], owner: int
) -> None:
    """Take the header from the GPU, unless a stream that does not end may still write to it."""
    if os.getpid() != owner:
        return
    deadline = time.monotonic() + _DRAIN_SECONDS
    with memoryview(held[0])[:HEADER_BYTES].cast("Q") as words:
        while last_write[0] and words[_W_DONE] != last_write[0]:
            if time.monotonic() >= deadline:
                log.warning("a snapshot's copy has not ended for %g s: its memory is kept", _DRAIN_SECONDS)
                _left_behind.append(held)
                return
            time.sleep(0.001)
    with contextlib.suppress(cuda.CudaError):
        gpu.unregister(address)
