"""What weightsync needs on a GPU, computed before any of it is taken; and memory kept for a transport's buffers."""

from __future__ import annotations

import gc
import logging
import os
import time
from dataclasses import dataclass

import torch

from ..plan.validate import IN_FLIGHT, M2N
from ..protocol.names import ENV_STAGING_MIB, ENV_STEP_BYTES
from . import cuda
from .slab import SlabError

log = logging.getLogger(__name__)

CONTEXT_BYTES = 700 << 20
"""CUDA context, modules and library state of one mover process; measured 617 MiB on an H200, digest kernels loaded."""
MIB = 1 << 20


def staging_bytes() -> int:
    """What transports may use for their buffers on this rank's GPU: by default that of M2N, one share for each step
    in flight and one for the library itself. Raises ValueError for a bad setting."""
    text = os.environ.get(ENV_STAGING_MIB)
    if text is None:
        step = os.environ.get(ENV_STEP_BYTES, "")
        return (IN_FLIGHT + 1) * (int(step) if step.isdecimal() else M2N.max_local_bytes)
    if not text.isdecimal() or int(text) > 1 << 20:
        raise ValueError(f"{ENV_STAGING_MIB} is {text!r}: give MiB as a whole number up to {1 << 20}")
    return int(text) * MIB


@dataclass(frozen=True)
class Needs:
    """Bytes of device memory, by use."""

    what: str
    """What the slab is: "shadow", "snapshot", ..."""
    slab: int
    contexts: int
    staging: int
    replaced: int = 0
    """Bytes in use that are given back once the slab is filled."""

    @classmethod
    def of(cls, what: str, slab: int, staging: int, spare: bool = True, replaced: int = 0) -> Needs:
        return cls(what, slab, CONTEXT_BYTES * (2 if spare else 1), staging, replaced)

    @property
    def lasting(self) -> int:
        """Beside what is in use already."""
        return self.slab + self.contexts + self.staging - self.replaced

    @property
    def total(self) -> int:
        """The most at any time: mover and spare come once the slab is filled."""
        return max(self.slab, self.lasting)

    def __str__(self) -> str:
        if self.replaced:
            return (
                f"{_size(self.total)} ({_size(self.slab)} for the {self.what}, given back before "
                f"{_size(self.contexts)} for the CUDA contexts of mover and spare and {_size(self.staging)} for "
                "staging are taken)"
            )
        movers = f"{_size(self.contexts)} for the CUDA contexts of mover and spare"
        return (
            f"{_size(self.total)} ({_size(self.slab)} for the {self.what}, {movers}, "
            f"{_size(self.staging)} for staging)"
        )


def check_memory(needs: Needs, place: torch.device, what_to_do: str, limit: int | None = None) -> None:
    """Whether the GPU has what is needed. `limit`: bytes that this process may have in use on it in all.

    Raises `SlabError` with all numbers in bytes and `what_to_do`.
    """
    gpu = cuda.open_device(place)
    if gpu.memory()[0] < needs.total:
        gc.collect()
        gpu.drop_cached()
    free, total = gpu.memory()
    where = f"{place} ({gpu.name})"
    if free < needs.total:
        raise SlabError(
            f"not enough memory on {where}: needed are {needs}, free are {_size(free)} of {_size(total)}: "
            f"{_size(needs.total - free)} too little; {what_to_do}"
        )
    if limit is not None:
        used = gpu.used_here()
        if used + needs.lasting > limit:
            raise SlabError(
                f"not enough memory on {where}: needed are {needs} beside {_size(used)} in use, but this server may "
                f"use {_size(limit)} of {_size(total)}: {_size(used + needs.lasting - limit)} too little, and nothing "
                f"would be left for the KV cache; {what_to_do}"
            )
    log.info("device memory on %s: needed %s, free %s of %s", where, needs, _size(free), _size(total))


class Staging:
    """Device memory that is taken while no transport needs it, so that nobody else counts on it.

    A transport allocates its buffers itself; `release` before it is made gives it room, `hold` after its end takes
    the room back. Without a GPU, or of no bytes, it does nothing.
    """

    def __init__(self, gpu: cuda.Device | None, size: int) -> None:
        self._gpu = gpu
        self._size = size
        self._memory: cuda.Memory | None = None

    @property
    def held(self) -> int:
        return self._memory.size if self._memory is not None else 0

    def hold(self, seconds: float = 0.0) -> str:
        """Take the memory; returns why it could not be taken within `seconds`, or nothing. A predecessor that was
        killed gives its own back within a second."""
        if self._gpu is None or self._size == 0 or self._memory is not None:
            return ""
        self._gpu.drop_cached()
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._memory = self._gpu.allocate(self._size)
                return ""
            except (MemoryError, cuda.CudaError) as e:
                if time.monotonic() >= deadline:
                    return f"no {_size(self._size)} for staging: {e}"
            time.sleep(0.05)

    def release(self) -> None:
        self._memory = None


def _size(count: int) -> str:
    return f"{count} bytes ({count / 1e6:.0f} MB)"
