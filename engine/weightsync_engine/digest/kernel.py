"""The digest's kernel (Triton): one read of the data, one launch over all boxes of one element width."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .tiles import TILE, Tiles

_BLOCK = 1024
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


# No annotations but constants': Triton evaluates them.
@triton.jit
def _finish(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


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
    if WIDTH == 1:
        data = address.to(tl.pointer_type(tl.uint8))
    elif WIDTH == 2:
        data = address.to(tl.pointer_type(tl.uint16))
    elif WIDTH == 4:
        data = address.to(tl.pointer_type(tl.uint32))
    else:
        data = address.to(tl.pointer_type(tl.uint64))
    data += begin
    if WHOLE:
        data = tl.multiple_of(data, 16)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.int64)
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
        key = _finish(index.to(tl.uint64) * _GOLDEN)
        value = _finish(key + bits.to(tl.uint64)).to(tl.int64, bitcast=True)
        if not WHOLE:
            value = tl.where(begin + inside < count, value, 0)
        total += value
    tl.atomic_add(out + slot, tl.sum(total, axis=0))


def add_digests(tiles: Tiles, width: int, out: torch.Tensor) -> None:
    """Add each box's sum to its slot of `out` (int64, on the boxes' device), on the current stream."""
    device = out.device
    rows, box, within = (torch.from_numpy(a).to(device) for a in (tiles.rows, tiles.box, tiles.within))
    launches = [(0, tiles.whole, True), (tiles.whole, len(tiles.box) - tiles.whole, False)]
    kernel: Any = _digest
    for first, count, whole in launches:
        if count:
            kernel[(count,)](
                rows, box, within, out, first, TILE=TILE, BLOCK=_BLOCK, WIDTH=width, WHOLE=whole, num_warps=4
            )
