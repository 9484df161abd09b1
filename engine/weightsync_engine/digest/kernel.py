"""The digest's kernel (Triton): one read of the data, one launch over all boxes of one element width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .tiles import TILE, Kind, Tiles

_BLOCKS = {Kind.RUN: 1024, Kind.ROWS: 1024, Kind.ANY: 1024}
"""Units that one step of a tile's loop takes; measured on an H200."""
_WARPS = {Kind.RUN: 4, Kind.ROWS: 4, Kind.ANY: 4}
_RUN = tl.constexpr(int(Kind.RUN))
_ROWS = tl.constexpr(int(Kind.ROWS))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LANE_0 = tl.constexpr(0x9E3779B97F4A7C15)
_LANE_1 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_LANE_2 = tl.constexpr(0x165667B19E3779F9)
_LANE_3 = tl.constexpr(0x27D4EB2F165667C5)
_MOD = 1 << 64
_ONES = tl.constexpr((_LANE_0.value + _LANE_1.value + _LANE_2.value + _LANE_3.value) % _MOD)
_BYTE_1 = tl.constexpr((_LANE_1.value - (_LANE_0.value << 8)) % _MOD)
_BYTE_2 = tl.constexpr((_LANE_2.value - (_LANE_1.value << 8)) % _MOD)
_BYTE_3 = tl.constexpr((_LANE_3.value - (_LANE_2.value << 8)) % _MOD)
_HALF_1 = tl.constexpr((_LANE_1.value - (_LANE_0.value << 16)) % _MOD)
_HALF_3 = tl.constexpr((_LANE_3.value - (_LANE_2.value << 16)) % _MOD)


# No annotations but constants': Triton evaluates them.
@triton.jit
def _finish(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _key(group):  # type: ignore[no-untyped-def]
    """What four neighbours share."""
    return _finish(group.to(tl.uint64) * _GOLDEN) | 1


@triton.jit
def _lane(at):  # type: ignore[no-untyped-def]
    """The constant of each of four neighbours."""
    zero = at.to(tl.uint64) * 0
    low = tl.where(at == 0, zero + _LANE_0, zero + _LANE_1)
    high = tl.where(at == 2, zero + _LANE_2, zero + _LANE_3)
    return tl.where(at < 2, low, high)


@triton.jit
def _fours(words, at, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each of the next GROUPS of four units, the sum over them of (unit + 1) times its lane's constant.

    Four units are one word `w` of 4 or 8 bytes, and the sum is taken of shifted words, without unpacking: units a, b of
    16 bits in a word give `w * A + (w >> 16) * (B - (A << 16)) = a * A + b * B`.
    """
    w = tl.load(words + at // 4 + tl.arange(0, GROUPS))
    if WIDTH == 1:
        w = w.to(tl.uint64)
        return _ONES + w * _LANE_0 + (w >> 8) * _BYTE_1 + (w >> 16) * _BYTE_2 + (w >> 24) * _BYTE_3
    low, high = w & 0xFFFFFFFF, w >> 32
    return _ONES + low * _LANE_0 + (low >> 16) * _HALF_1 + high * _LANE_2 + (high >> 16) * _HALF_3


@triton.jit
def _digest(  # type: ignore[no-untyped-def]
    rows,
    box_of,
    within_of,
    out,
    first,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0) + first
    row = rows + tl.load(box_of + tile).to(tl.int64) * 7
    begin = tl.load(within_of + tile).to(tl.int64) * TILE
    address = tl.load(row)
    count = tl.load(row + 1)
    start = tl.load(row + 2)
    extent = tl.load(row + 3)
    outer = tl.load(row + 4)
    whole = tl.load(row + 5)
    slot = tl.load(row + 6)
    if WIDTH == 1:  # noqa: SIM108 - Triton's
        data = address.to(tl.pointer_type(tl.uint8))
    else:
        data = address.to(tl.pointer_type(tl.uint16))
    data += begin
    if WIDTH == 1:  # noqa: SIM108
        words = data.to(tl.pointer_type(tl.uint32))
    else:
        words = data.to(tl.pointer_type(tl.uint64))
    words = tl.multiple_of(words, 16)
    GROUPS: tl.constexpr = BLOCK // 4
    group = tl.arange(0, GROUPS)
    if KIND == _RUN:
        sums = tl.zeros([GROUPS], dtype=tl.uint64)
        base = (begin + start) // 4
        for at in range(0, TILE, BLOCK):
            sums += _fours(words, at, GROUPS, WIDTH) * _key(base + at // 4 + group)
        tl.atomic_add(out + slot, tl.sum(sums, axis=0).to(tl.int64, bitcast=True))
    elif KIND == _ROWS:
        sums = tl.zeros([GROUPS], dtype=tl.uint64)
        # Of the tile's first four: its row, and its place in that row.
        length = (extent // 4).to(tl.int32)
        outer_row = begin // extent + outer
        within = ((begin % extent) // 4).to(tl.int32)
        for at in range(0, TILE, BLOCK):
            place = within + at // 4 + group
            down = place // length
            index = (outer_row + down) * (whole // 4) + (place - down * length) + start // 4
            sums += _fours(words, at, GROUPS, WIDTH) * _key(index)
        tl.atomic_add(out + slot, tl.sum(sums, axis=0).to(tl.int64, bitcast=True))
    else:
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.int64)
        one_run = extent == 0
        if one_run:
            outer_row = begin * 0
            within = 0
            length = 1
        else:
            outer_row = begin // extent + outer
            within = (begin % extent).to(tl.int32)
            length = extent.to(tl.int32)
        for at in range(0, TILE, BLOCK):
            inside = at + lanes
            here = begin + inside < count
            bits = tl.load(data + inside, mask=here, other=0)
            if one_run:
                index = begin + start + inside
            else:
                place = within + inside
                down = place // length
                index = (outer_row + down) * whole + (place - down * length) + start
            value = ((bits.to(tl.uint64) + 1) * (_key(index >> 2) * _lane(index & 3))).to(
                tl.int64, bitcast=True
            )
            total += tl.where(here, value, 0)
        tl.atomic_add(out + slot, tl.sum(total, axis=0))


@dataclass(frozen=True)
class Work:
    """Tiles of one element width, on the device."""

    rows: torch.Tensor
    box: torch.Tensor
    within: torch.Tensor
    counts: tuple[int, ...]

    @classmethod
    def upload(cls, tiles: Tiles, device: torch.device) -> Work:
        rows, box, within = (torch.from_numpy(a).to(device) for a in (tiles.rows, tiles.box, tiles.within))
        return cls(rows, box, within, tiles.counts)


def add_digests(work: Work, width: int, out: torch.Tensor) -> None:
    """Add each box's sum to its slot of `out` (int64, on the boxes' device), on the current stream."""
    kernel: Any = _digest
    first = 0
    for kind, count in zip(Kind, work.counts, strict=True):
        if count:
            kernel[(count,)](
                work.rows, work.box, work.within, out, first,
                KIND=int(kind), TILE=TILE, BLOCK=_BLOCKS[kind], WIDTH=width, num_warps=_WARPS[kind],
            )  # fmt: skip
        first += count
