"""A GPU made of host memory, in place of what `weightsync_engine.mover.cuda` asks the driver for.

Its memory is a memfd that another process maps by the handle, as with CUDA IPC; its one stream holds the words that it
was told to write until `run` is called. In a mover's process it is put in place by `site/sitecustomize.py`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weightsync_engine.mover import cuda

SITE = Path(__file__).parent / "site"
UUID = bytes(range(16))
_HANDLE = struct.Struct("<qq48x")


class _Mapping(mmap.mmap):
    """Can be referred to weakly."""


class FakeMemory:
    def __init__(self, device: FakeDevice, fd: int, size: int, owned: bool) -> None:
        self.mapping, self.size, self.fd = _Mapping(fd, size), size, fd if owned else -1
        device.used += size if owned else 0
        # As with the real one, the memory lives for as long as any view of it.
        weakref.finalize(self.mapping, _give_back, device, fd, size if owned else 0)


def _give_back(device: FakeDevice, fd: int, size: int) -> None:
    os.close(fd)
    device.used -= size


class FakeDevice:
    """`total` bytes of memory; `exports` and `writes` say what it can."""

    def __init__(self, total: int = 1 << 30, exports: bool = True, writes: bool = True) -> None:
        self.torch = torch.device("cpu")
        self.uuid, self.name = UUID, cuda.uuid_name(UUID)
        self.total, self.used, self.cached = total, 0, 0
        self.exports, self.writes = exports, writes
        self.pending: list[tuple[int, int]] = []
        self.registered: set[int] = set()
        self.waits = 0

    def memory(self) -> tuple[int, int]:
        return self.total - self.used - self.cached, self.total

    def allocate(self, size: int) -> FakeMemory:
        size = max(-(-size // cuda.GRANULE), 1) * cuda.GRANULE
        if size > self.memory()[0]:
            raise MemoryError(f"{size} bytes asked for, {self.memory()[0]} bytes free on {self.name}")
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, size)
        return FakeMemory(self, fd, size, owned=True)

    def export(self, memory: FakeMemory) -> tuple[bytes, int]:
        if not self.exports:
            raise cuda.CudaError("cuIpcGetMemHandle", 801, "operation not supported")
        return _HANDLE.pack(os.getpid(), memory.fd), 0

    def map(self, handle: bytes, size: int) -> FakeMemory:
        pid, number = _HANDLE.unpack(handle)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as e:
            raise cuda.CudaError("cuIpcOpenMemHandle_v2", 400, "invalid resource handle") from e
        return FakeMemory(self, fd, size, owned=False)

    def tensor(self, memory: FakeMemory) -> torch.Tensor:
        return torch.frombuffer(memory.mapping, dtype=torch.uint8)

    def register(self, address: int, size: int) -> int:
        if not self.writes:
            return 0
        self.registered.add(address)
        return address

    def unregister(self, address: int) -> None:
        self.registered.remove(address)

    def write_after_stream(self, pointer: int, value: int) -> None:
        self.pending.append((pointer, value))

    def run(self) -> None:
        """Let the stream do what it holds."""
        while self.pending:
            pointer, value = self.pending.pop(0)
            ctypes.c_uint64.from_address(pointer).value = value

    def synchronise_stream(self) -> None:
        self.waits += 1
        self.run()

    def cached_bytes(self) -> int:
        return self.cached

    def used_here(self) -> int:
        return self.cached

    def drop_cached(self) -> None:
        self.cached = 0


@contextmanager
def in_place(device: FakeDevice) -> Iterator[FakeDevice]:
    """Every GPU that is asked for is `device`, in this process."""
    before = cuda.open_device, cuda.find_device
    cuda.open_device, cuda.find_device = lambda place: device, _finder(device)  # type: ignore[assignment]
    try:
        yield device
    finally:
        cuda.open_device, cuda.find_device = before


def _finder(device: FakeDevice):  # type: ignore[no-untyped-def]
    def find(uuid: bytes) -> FakeDevice:
        if uuid != device.uuid:
            raise LookupError(f"{cuda.uuid_name(uuid)} is not visible here")
        return device

    return find


def mover_environment() -> dict[str, str]:
    """For a mover that is to find the fake device."""
    root = Path(__file__).parents[2]
    paths = [str(SITE), str(root), str(root / "engine"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
