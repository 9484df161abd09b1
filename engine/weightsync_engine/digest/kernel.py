"""The digest's kernel (Triton): one read of the data, one launch over all boxes of one element width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .tiles import TILE, Tiles

_BLOCK = 1024
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LANE_0 = tl.constexpr(0x9E3779B97F4A7C15)
_LANE_1 = tl.constexpr(0xC2B2AE3D27D4EB4F)
_LANE_2 = tl.constexpr(0x165667B19E3779F9)
_LANE_3 = tl.constexpr(0x27D4EB2F165667C5)


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
def _fours(data, at, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each of the next GROUPS of four units, the sum over them of (unit + 1) times its lane's constant."""
    group = tl.arange(0, GROUPS)
    if WIDTH == 1:
        lane = tl.arange(0, 4)
        bits = tl.load(data + (at + group * 4)[:, None] + lane[None, :])
        return tl.sum((bits.to(tl.uint64) + 1) * _lane(lane)[None, :], axis=1)
    # Two units in a word of 32 bits, which is read and multiplied at once: w * a + (w >> 16) * (b - (a << 16)).
    half = tl.arange(0, 2)
    first = _lane(half * 2)
    second = _lane(half * 2 + 1) - (first << 16)
    words = tl.load(data.to(tl.pointer_type(tl.uint32)) + at // 2 + (group * 2)[:, None] + half[None, :])
    products = words.to(tl.uint64) * first[None, :] + (words >> 16).to(tl.uint64) * second[None, :]
    ones = tl.sum(_lane(tl.arange(0, 4)), axis=0)
    return tl.sum(products, axis=1) + ones


@triton.jit
def _digest(  # type: ignore[no-untyped-def]
    rows,
    box_of,
    within_of,
    out,
    first,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
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
    if WHOLE:
        data = tl.multiple_of(data, 16)
    one_run = extent == 0
    # Of the tile's first element: its row and its place in that row.
    if one_run:
        base = begin + start
        outer_row = base * 0
        within = 0
        length = 1
    else:
        outer_row = begin // extent + outer
        base = start
        within = (begin % extent).to(tl.int32)
        length = extent.to(tl.int32)
    if WHOLE and (base | within | extent | whole) % 4 == 0:
        # Every four neighbours in memory are neighbours in the parameter, and share their key.
        GROUPS: tl.constexpr = BLOCK // 4
        group = tl.arange(0, GROUPS)
        sums = tl.zeros([GROUPS], dtype=tl.uint64)
        # A loop for each case: a branch inside one costs several times what the arithmetic does.
        if one_run:
            for at in range(0, TILE, BLOCK):
                sums += _fours(data, at, GROUPS, WIDTH) * _key((base + at) // 4 + group)
        else:
            for at in range(0, TILE, BLOCK):
                place = (within + at) // 4 + group
                down = place // (length // 4)
                index = (outer_row + down) * (whole // 4) + (place - down * (length // 4)) + base // 4
                sums += _fours(data, at, GROUPS, WIDTH) * _key(index)
        tl.atomic_add(out + slot, tl.sum(sums, axis=0).to(tl.int64, bitcast=True))
    else:
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], dtype=tl.int64)
        for at in range(0, TILE, BLOCK):
            inside = at + lanes
            if WHOLE:  # noqa: SIM108
                bits = tl.load(data + inside)
            else:
                bits = tl.load(data + inside, mask=begin + inside < count, other=0)
            if one_run:
                index = base + inside
            else:
                place = within + inside
                down = place // length
                index = (outer_row + down) * whole + (place - down * length) + base
            value = ((bits.to(tl.uint64) + 1) * (_key(index >> 2) * _lane(index & 3))).to(
                tl.int64, bitcast=True
            )
            if not WHOLE:
                value = tl.where(begin + inside < count, value, 0)
            total += value
        tl.atomic_add(out + slot, tl.sum(total, axis=0))


@dataclass(frozen=True)
class Work:
    """Tiles of one element width, on the device."""

    rows: torch.Tensor
    box: torch.Tensor
    within: torch.Tensor
    whole: int

    @classmethod
    def upload(cls, tiles: Tiles, device: torch.device) -> Work:
        rows, box, within = (torch.from_numpy(a).to(device) for a in (tiles.rows, tiles.box, tiles.within))
        return cls(rows, box, within, tiles.whole)


def add_digests(work: Work, width: int, out: torch.Tensor) -> None:
    """Add each box's sum to its slot of `out` (int64, on the boxes' device), on the current stream."""
    launches = [(0, work.whole, True), (work.whole, len(work.box) - work.whole, False)]
    kernel: Any = _digest
    for first, count, whole in launches:
        if count:
            kernel[(count,)](
                work.rows, work.box, work.within, out, first,
                TILE=TILE, BLOCK=_BLOCK, WIDTH=width, WHOLE=whole, num_warps=4,
            )  # fmt: skip
