"""The slab: one block of memory that a parent allocates and its mover maps.

A header page of fixed form, then the payload. The header carries a stamp (which version the payload holds)
guarded by a seqlock: one writer at a time (trainer: the parent; worker: the mover), readers in any process
never block and never see a stamp of a payload that is being written. Today the payload is host memory in the
same memfd; the header says so, and a slab on a GPU will keep its header in the memfd and name its device
memory there.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
import zlib
from collections.abc import Iterable

import torch

from ..layout.tensors import DTYPE_BYTES, SlabTensor
from ..protocol.messages import Published

HEADER_BYTES = 4096
ALIGNMENT = 256

_MAGIC = int.from_bytes(b"wsslab01", "little")
_HOST_MEMORY = 1
# Header words of 8 bytes: magic, kind of memory, payload bytes, seqlock, sequence, length of the version,
# its crc32.
_W_MAGIC, _W_KIND, _W_PAYLOAD, _W_LOCK, _W_SEQUENCE, _W_LENGTH, _W_CRC = range(7)
_VERSION_AT = 128
_VERSION_MAX = 256


class SlabError(ValueError):
    """A slab that cannot be made, mapped or read as asked; says what is wrong and where."""


def plan_slab(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> tuple[dict[str, SlabTensor], int]:
    """Lay out named tensors (name, shape, dtype) one after the other, each aligned to 256 bytes.

    Returns where each one is and the payload bytes to create. Raises `SlabError` for a repeated name, an
    unknown dtype or a negative extent. Tensors without elements get a place of zero bytes.
    """
    places: dict[str, SlabTensor] = {}
    offset = 0
    for name, shape, dtype in tensors:
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

    def __init__(self, fd: int, payload_bytes: int, mapping: mmap.mmap) -> None:
        self._fd = fd
        self.payload_bytes = payload_bytes
        self._words = memoryview(mapping)[:HEADER_BYTES].cast("Q")
        self._bytes = memoryview(mapping)[:HEADER_BYTES]
        # The payload tensor keeps the mapping alive for as long as any view of it lives, beyond close() too.
        self._payload = torch.frombuffer(mapping, dtype=torch.uint8)[HEADER_BYTES:]
        self._fence = threading.Lock()

    @classmethod
    def create(cls, payload_bytes: int) -> Slab:
        """A new slab of zeros, never stamped. Its memory is taken now, so that lack of it shows here."""
        if payload_bytes < 0:
            raise SlabError(f"a slab cannot have {payload_bytes} bytes")
        size = HEADER_BYTES + payload_bytes
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
        except BaseException:
            os.close(fd)
            raise
        slab = cls(fd, payload_bytes, mapping)
        slab._words[_W_KIND] = _HOST_MEMORY
        slab._words[_W_PAYLOAD] = payload_bytes
        slab._words[_W_MAGIC] = _MAGIC
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
        if words[_W_KIND] != _HOST_MEMORY:
            raise SlabError(
                f"descriptor {fd} holds a slab in memory of kind {words[_W_KIND]}, unknown to this build"
            )
        if words[_W_PAYLOAD] != size - HEADER_BYTES:
            raise SlabError(f"slab of {size} bytes says it carries {words[_W_PAYLOAD]} bytes of payload")
        return cls(fd, size - HEADER_BYTES, mapping)

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
        """The payload holds `version` now, wholly. Raises `SlabError` without a `begin_write` before."""
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

    def read_stamp(self) -> Published | None:
        """What the payload holds, or None: never written, or being written. Never blocks."""
        for _ in range(16):
            before = self._words[_W_LOCK]
            if before == 0 or before & 1:
                return None
            self._order()
            length, sequence, crc = self._words[_W_LENGTH], self._words[_W_SEQUENCE], self._words[_W_CRC]
            text = bytes(self._bytes[_VERSION_AT : _VERSION_AT + min(length, _VERSION_MAX)])
            self._order()
            if self._words[_W_LOCK] == before and zlib.crc32(text, sequence & 0xFFFFFFFF) == crc:
                return Published(version=text.decode(), sequence=sequence)
        return None

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
        self._words.release()
        self._bytes.release()
        self._payload = torch.empty(0, dtype=torch.uint8)
