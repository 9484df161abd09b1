"""One GPU through the CUDA driver's own library: memory that another process can map, and words that a stream
writes.

Straight to `libcuda.so.1`, which is there wherever a GPU is, has a stable interface and needs no package. Memory
comes from `cuMemAlloc`, never from torch's allocator: with expandable segments, or inside vLLM's sleep-mode pool,
torch's memory cannot be exported. All of it is in the device's primary context, which is torch's too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # some of whose functions have no types

HANDLE_BYTES = 64
UUID_BYTES = 16
GRANULE = 2 << 20
"""The driver puts smaller allocations into one block, and a handle exports the whole block: so whole ones are taken."""

_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_REGISTER_DEVICEMAP = 2
_HAS_64_BIT_STREAM_WRITES = 122
_NAMES = {1: "bad argument", 2: "out of memory", 100: "no device", 201: "bad context", 801: "not supported"}


class CudaError(RuntimeError):
    """A call into the driver that failed; says which and why."""

    def __init__(self, call: str, code: int, why: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code} ({why})")
        self.code = code


class _Uuid(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * UUID_BYTES)]


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


_CALLS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGetUuid_v2": [POINTER(_Uuid), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemAlloc_v2": [POINTER(c_uint64), c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemGetAddressRange_v2": [POINTER(c_uint64), POINTER(c_size_t), c_uint64],
    "cuIpcGetMemHandle": [POINTER(_Handle), c_uint64],
    "cuIpcOpenMemHandle_v2": [POINTER(c_uint64), _Handle, c_uint],
    "cuIpcCloseMemHandle": [c_uint64],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [POINTER(c_uint64), c_void_p, c_uint],
    "cuStreamWriteValue64_v2": [c_void_p, c_uint64, c_uint64, c_uint],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class Driver:
    """The library's functions, each raising `CudaError`."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _CALLS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = c_char_p()
            self._library.cuGetErrorString(code, byref(text))
            raise CudaError(name, code, text.value.decode() if text.value else _NAMES.get(code, "unknown"))


@functools.cache
def driver() -> Driver:
    """The machine's. Raises OSError without one, `CudaError` without a usable GPU."""
    return Driver()


class Device:
    """One GPU, as this process numbers it. Calls are good in any thread: each makes the context current itself."""

    def __init__(self, driver: Driver, index: int) -> None:
        self._driver = driver
        self.torch = torch.device("cuda", index)
        number, uuid, context, can = c_int(), _Uuid(), c_void_p(), c_int()
        driver.call("cuDeviceGet", byref(number), index)
        driver.call("cuDeviceGetUuid_v2", byref(uuid), number)
        driver.call("cuDeviceGetAttribute", byref(can), _HAS_64_BIT_STREAM_WRITES, number)
        # Held for the life of the process: torch's is the same one.
        driver.call("cuDevicePrimaryCtxRetain", byref(context), number)
        self.uuid = bytes(uuid.data)
        self._context = context
        self._writes = bool(can.value)

    @property
    def name(self) -> str:
        """As nvidia-smi and CUDA_VISIBLE_DEVICES have it."""
        return uuid_name(self.uuid)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, with all processes counted."""
        free, total = c_size_t(), c_size_t()
        with self._current():
            self._driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> Memory:
        """At least `size` bytes of memory that can be exported, of no defined content. Raises `MemoryError`."""
        size = max(-(-size // GRANULE), 1) * GRANULE
        pointer = c_uint64()
        try:
            with self._current():
                self._driver.call("cuMemAlloc_v2", byref(pointer), size)
        except CudaError as e:
            if e.code != _OUT_OF_MEMORY:
                raise
            raise MemoryError(f"{size} bytes asked for, {self.memory()[0]} bytes free on {self.name}") from e
        return Memory(self, pointer.value, size, "cuMemFree_v2")

    def export(self, memory: Memory) -> tuple[bytes, int]:
        """(handle, offset of the memory in what the handle maps). Raises `CudaError` where it cannot be."""
        handle, base, size = _Handle(), c_uint64(), c_size_t()
        with self._current():
            self._driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), memory.pointer)
            self._driver.call("cuIpcGetMemHandle", byref(handle), memory.pointer)
        return bytes(handle.data), memory.pointer - base.value

    def map(self, handle: bytes, size: int) -> Memory:
        """Memory of another process, `size` bytes from the handle's own beginning on."""
        pointer = c_uint64()
        with self._current():
            self._driver.call(
                "cuIpcOpenMemHandle_v2", byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
        return Memory(self, pointer.value, size, "cuIpcCloseMemHandle")

    def release(self, pointer: int, how: str) -> None:
        """Give memory back, as part of its finaliser."""
        with self._current():
            self._driver.call(how, pointer)

    def tensor(self, memory: Memory) -> torch.Tensor:
        """Its bytes as a tensor, which keeps the memory for as long as any view of it lives."""
        _cuda.init()
        return torch.as_tensor(memory, device=self.torch)

    def register(self, address: int, size: int) -> int:
        """Let the GPU write to whole pages of host memory; returns their address for it. 0 where a stream cannot
        write words."""
        if not self._writes:
            return 0
        pointer = c_uint64()
        with self._current():
            self._driver.call("cuMemHostRegister_v2", address, size, _REGISTER_DEVICEMAP)
            self._driver.call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
        return pointer.value

    def unregister(self, address: int) -> None:
        with self._current():
            self._driver.call("cuMemHostUnregister", address)

    def write_after_stream(self, pointer: int, value: int) -> None:
        """Write a word of 8 bytes once all that the current stream holds has ended, and is visible. Returns at
        once."""
        stream = _cuda.current_stream(self.torch).cuda_stream
        with self._current():
            self._driver.call("cuStreamWriteValue64_v2", stream, pointer, value, 0)

    def synchronise_stream(self) -> None:
        _cuda.current_stream(self.torch).synchronize()

    def cached_bytes(self) -> int:
        """Memory that torch's allocator holds in this process and does not use."""
        if not _cuda.is_initialized():
            return 0
        return int(_cuda.memory_reserved(self.torch) - _cuda.memory_allocated(self.torch))

    def used_here(self) -> int:
        """Memory that torch's allocator holds in this process."""
        return int(_cuda.memory_reserved(self.torch)) if _cuda.is_initialized() else 0

    def drop_cached(self) -> None:
        if _cuda.is_initialized():
            _cuda.empty_cache()


class Memory:
    """A run of device memory, given back when nothing refers to it any more."""

    def __init__(self, device: Device, pointer: int, size: int, how: str) -> None:
        self.pointer, self.size = pointer, size
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2, "strides": None,
        }  # fmt: skip
        finalizer = weakref.finalize(self, _give_back, device, pointer, how, os.getpid())
        finalizer.atexit = False  # the driver takes all back with the process


def _give_back(device: Device, pointer: int, how: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner has no context
    try:
        device.release(pointer, how)
    except CudaError as e:
        log.warning("device memory could not be given back: %s", e)


def uuid_name(uuid: bytes) -> str:
    h = uuid.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


@functools.cache
def _device(index: int) -> Device:
    return Device(driver(), index)


def open_device(device: torch.device) -> Device:
    """The GPU that torch calls `device`; a device without index is the current one."""
    return _device(_cuda.current_device() if device.index is None else device.index)


def find_device(uuid: bytes) -> Device:
    """The GPU of that UUID. Raises `LookupError` where this process does not see it."""
    count = c_int()
    driver().call("cuDeviceGetCount", byref(count))
    seen = []
    for index in range(count.value):
        number, found = c_int(), _Uuid()
        driver().call("cuDeviceGet", byref(number), index)
        driver().call("cuDeviceGetUuid_v2", byref(found), number)
        if bytes(found.data) == uuid:
            return _device(index)
        seen.append(uuid_name(bytes(found.data)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise LookupError(
        f"{uuid_name(uuid)} is not visible here (CUDA_VISIBLE_DEVICES={visible}, seen: {', '.join(seen) or 'none'})"
    )


def visible_to_child(uuid: bytes, environment: dict[str, str]) -> dict[str, str]:
    """What a child needs in its environment to see that GPU, and no other: it becomes the child's cuda:0."""
    if "MIG-" in environment.get("CUDA_VISIBLE_DEVICES", ""):
        return {}  # a part of a GPU has a name of another form, and is the only one already
    return {"CUDA_VISIBLE_DEVICES": uuid_name(uuid)}
