"""A digest of a parameter that does not depend on how it is sharded.

A parameter is seen as units of 16 bits (of 8 where an element has no more). The digest is the 64-bit sum, over the
units, of (the unit's bits + 1) times an odd key that is a strong mix of its linear index in the whole parameter. Sums
over disjoint boxes add up to the sum over their union, so shards and replicas of any layout can be compared by addition
alone. As keys are odd, one changed, missing or doubled unit always changes the sum; any other difference goes unseen
with a chance of 2^-48 at worst. It guards against faults, not against forgers. Four neighbours share one mix and differ
by constants, so that a GPU does the sum about as fast as it reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..layout.boxes import Box
from . import cuda

MODULUS = 1 << 64
Dims = list[tuple[int, int, int]]
"""(start, extent, whole extent) of each dimension of a box, neighbours joined where they can be."""
_CHUNK = 1 << 15  # elements: the temporaries of a chunk stay in the processor's cache
_DEVICE_CHUNK = 1 << 24  # elements: few launches, and temporaries of some hundred MB
_SMALL = 1 << 13  # elements: below, the calls cost more than the elements, and boxes share them
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LANES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
"""Odd: of the four neighbours that share a mix."""
_UNITS = {1: torch.uint8, 2: torch.int16}


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return value - MODULUS if value >= MODULUS >> 1 else value


def box_digest(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Digest, in `[0, 2**64)`, of the elements `box` of a parameter of `shape`, held in `tensor` (of box's
    shape).

    Raises ValueError where tensor, box and shape do not fit each other.
    """
    dims = _checked(tensor, box, shape)
    if tensor.is_cuda:
        return cuda.Digests([units_of(tensor, dims)], _sum).sums()[0]
    return int(_sum(tensor, dims)) % MODULUS


def warm_up(device: torch.device) -> None:
    """Compile what digests on that device need."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            cuda.kernel()


def units_of(tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, Dims]:
    """A box's elements as a flat tensor of units, and the box's joined dimensions counted in units."""
    width = min(tensor.element_size(), 2)
    each = tensor.element_size() // width
    flat = tensor.reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=_UNITS[width], device=tensor.device), dims
    if flat.stride(0) != 1:  # a column, or one element of whatever stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(_UNITS[width])
    if each > 1:
        start, extent, whole = dims[-1] if dims else (0, 1, 1)
        dims = [*dims[:-1], (start * each, extent * each, whole * each)]
    return flat, dims


def _sum(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """The sum over a box's elements as a tensor without dimensions, on the tensor's device."""
    flat, dims = units_of(tensor, dims)
    mask = (1 << 8 * flat.element_size()) - 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    chunk = _DEVICE_CHUNK if tensor.is_cuda else _CHUNK
    start, extent, whole = dims[-1] if dims else (0, 1, 1)
    # Where neighbours in memory that share a key are neighbours in the parameter, each key is worked out once.
    fours = start % 4 == extent % 4 == 0 and (whole % 4 == 0 or len(dims) == 1)
    groups = [*dims[:-1], (start // 4, extent // 4, whole // 4)]
    for at in range(0, flat.numel(), chunk):
        bits = flat[at : at + chunk].to(torch.int64, copy=True)
        bits &= mask
        end = at + bits.numel()
        if fours:
            index = torch.arange(at // 4, end // 4, dtype=torch.int64, device=tensor.device)
            bits += 1
            bits = bits.view(-1, 4)
            bits *= _lanes(tensor.device)
            total += (bits.sum(1) * _keys(_linear(index, groups))).sum()
        else:
            index = torch.arange(at, end, dtype=torch.int64, device=tensor.device)
            total += _values(bits, _linear(index, dims)).sum()
    return total


class Digests:
    """`box_digest` of many boxes that stay where they are in memory while what is in them changes; what can be worked
    out beforehand is. Small ones cost a few microseconds each.

    Raises ValueError as `box_digest` does.
    """

    def __init__(self, held: Iterable[tuple[torch.Tensor, Box, tuple[int, ...]]]) -> None:
        self._held = [(tensor, _checked(tensor, box, shape)) for tensor, box, shape in held]
        self._on_gpu: cuda.Digests | None = None
        self._copied: list[int] = []
        """Those on a GPU that are no run of memory, which is found only in a copy of the moment."""
        if self._held and self._held[0][0].is_cuda:
            whole = [at for at, (tensor, _) in enumerate(self._held) if tensor.is_contiguous()]
            self._runs = whole
            self._copied = sorted(set(range(len(self._held))) - set(whole))
            self._on_gpu = cuda.Digests([units_of(*self._held[at]) for at in whole], _sum)

    def sums(self) -> list[int]:
        """The digests of what the boxes hold now, in order."""
        if self._on_gpu is None:
            return _on_host(self._held)
        sums = dict(zip(self._runs, self._on_gpu.sums(), strict=True))
        if self._copied:
            copied = cuda.Digests([units_of(*self._held[at]) for at in self._copied], _sum)
            sums |= dict(zip(self._copied, copied.sums(), strict=True))
        return [sums[at] for at in range(len(self._held))]


def _on_host(held: list[tuple[torch.Tensor, Dims]]) -> list[int]:
    sums: list[int] = []
    batches: dict[tuple[int, torch.device], _Batch] = {}
    for at, (tensor, dims) in enumerate(held):
        sums.append(0)
        if tensor.numel() > _SMALL or len(dims) > 2:
            sums[at] = int(_sum(tensor, dims)) % MODULUS
        elif tensor.numel():
            key = (min(tensor.element_size(), 2), tensor.device)
            batch = batches.setdefault(key, _Batch(*key))
            batch.add(at, tensor, dims)
            if batch.size >= _CHUNK:
                batch.into(sums)
                del batches[key]
    for batch in batches.values():
        batch.into(sums)
    return sums


class _Batch:
    """Small boxes whose elements are mixed in common."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device, self.size = width, device, 0
        self._places: list[int] = []
        self._bits: list[torch.Tensor] = []
        self._rows: list[tuple[int, int, int, int, int]] = []

    def add(self, place: int, tensor: torch.Tensor, dims: Dims) -> None:
        flat, dims = units_of(tensor, dims)
        outer, _, _ = dims[0] if len(dims) == 2 else (0, 1, 1)
        start, extent, whole = dims[-1] if dims else (0, 1, 1)
        self._places.append(place)
        self._bits.append(flat)
        self._rows.append((self.size, extent, outer, whole, start))
        self.size += flat.numel()

    def into(self, sums: list[int]) -> None:
        """Write each box's sum to its place."""
        lengths = torch.tensor([bits.numel() for bits in self._bits], device=self.device)
        owner = torch.repeat_interleave(lengths, output_size=self.size)
        rows = torch.tensor(self._rows, dtype=torch.int64, device=self.device).T
        first, extent, outer, whole, start = (row.index_select(0, owner) for row in rows)
        bits = torch.cat(self._bits).to(torch.int64, copy=True)
        bits &= (1 << 8 * self.width) - 1
        position = torch.arange(self.size, dtype=torch.int64, device=self.device) - first
        index = (position // extent + outer) * whole + position % extent + start
        total = torch.zeros(len(self._places), dtype=torch.int64, device=self.device)
        total.index_add_(0, owner, _values(bits, index))
        for place, value in zip(self._places, total.tolist(), strict=True):
            sums[place] = value % MODULUS


def _checked(tensor: torch.Tensor, box: Box, shape: tuple[int, ...]) -> Dims:
    """The box's joined dimensions."""
    if tuple(tensor.shape) != box.shape or not Box.whole(shape).contains(box):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not hold {box} of shape {shape}")
    return _joined(box, shape)


def _values(bits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """What each element adds to the sum; int64, in place of `bits`."""
    lane = _lanes(bits.device).index_select(0, index & 3)
    index >>= 2
    bits += 1
    bits *= _keys(index)
    bits *= lane
    return bits


def _lanes(device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(lane) for lane in _LANES], dtype=torch.int64, device=device)


def _keys(group: torch.Tensor) -> torch.Tensor:
    """What four neighbours share; in place of `group`."""
    group *= _signed(_GOLDEN)
    key = _finish(group)
    key |= 1
    return key


def _finish(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, in place. int64 products wrap; shifts are made logical by the masks."""
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= _signed(_MIX_1)
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _signed(_MIX_2)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def _joined(box: Box, shape: tuple[int, ...]) -> Dims:
    """(start, extent, whole extent) per dimension, with neighbours joined where the inner one is whole."""
    dims: Dims = []
    for start, extent, whole in zip(box.start, box.shape, shape, strict=True):
        if dims and extent == whole:
            a, n, w = dims[-1]
            dims[-1] = (a * whole, n * whole, w * whole)
        else:
            dims.append((start, extent, whole))
    return dims


def _linear(position: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Linear indices in the whole parameter of linear positions in the box."""
    if len(dims) <= 1:
        return position + dims[0][0] if dims else position
    result = torch.zeros_like(position)
    stride = 1
    for at, (start, extent, whole) in enumerate(reversed(dims)):
        inner = position if at == len(dims) - 1 else position % extent
        result += (inner + start) * stride
        position = position // extent
        stride *= whole
    return result
