"""How boxes are cut into tiles for one launch over all of them: plain arrays, no GPU.

Elements of a box lie one after the other in memory. A box is described by at most two joined dimensions: element
`p` has the index `(p // extent + outer) * whole + p % extent + start` in its parameter; with `extent` 0 it is one run,
`p + start`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE = 1 << 15
"""Units of a tile."""
FAST_ALIGNMENT = 16
"""Bytes: what the wide loads of a whole tile need."""
MAX_EXTENT = (1 << 31) - TILE - 1
FIELDS = ("address", "count", "start", "extent", "outer", "whole", "slot")


class Kind(enum.IntEnum):
    """Of a tile. Each is a kernel of its own: the registers that the hardest path needs would slow the others down."""

    RUN = 0
    """Full and aligned, one run whose neighbours in fours are such fours of the parameter, which share a key."""
    ROWS = 1
    """The same in rows."""
    ANY = 2


@dataclass(frozen=True)
class Boxed:
    """One box of units of one width, as the kernel sees it."""

    address: int
    count: int
    dims: Sequence[tuple[int, int, int]]
    """(start, extent, whole extent), joined, at most two."""
    slot: int
    """Where its sum goes."""

    def row(self) -> tuple[int, ...]:
        if len(self.dims) < 2:
            return (self.address, self.count, self.dims[0][0] if self.dims else 0, 0, 0, 0, self.slot)
        (outer, _, _), (start, extent, whole) = self.dims
        return (self.address, self.count, start, extent, outer, whole, self.slot)


def fits(dims: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the kernel's arithmetic covers such a box."""
    return len(dims) <= 1 or (len(dims) == 2 and dims[1][1] <= MAX_EXTENT)


@dataclass(frozen=True)
class Tiles:
    """Tile `t` is the `within[t]`-th of box `box[t]`; tiles of one kind are neighbours, in the kinds' order."""

    rows: NDArray[np.int64]
    """[boxes, FIELDS]."""
    box: NDArray[np.int32]
    within: NDArray[np.int32]
    counts: tuple[int, ...]
    """Of tiles, by kind."""


def cut(boxes: Sequence[Boxed]) -> Tiles:
    """Tiles of boxes of one element width; none for a box without elements."""
    rows = np.array([b.row() for b in boxes], dtype=np.int64).reshape(len(boxes), len(FIELDS))
    address, count, start, extent, _, whole, _ = rows.T
    last = -(-count // TILE)
    # A box's own dimensions decide for all its tiles, as a tile begins at a multiple of four.
    fours = (address % FAST_ALIGNMENT == 0) & ((start | extent | whole) % 4 == 0)
    full = np.where(fours, count // TILE, 0)
    run = extent == 0
    spans = {
        Kind.RUN: (np.zeros_like(full), np.where(run, full, 0)),
        Kind.ROWS: (np.zeros_like(full), np.where(run, 0, full)),
        Kind.ANY: (full, last),
    }
    parts = [_spread(*spans[kind]) for kind in Kind]
    return Tiles(
        rows,
        np.concatenate([box for box, _ in parts]),
        np.concatenate([within for _, within in parts]),
        tuple(len(box) for box, _ in parts),
    )


def _spread(first: NDArray[np.int64], end: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(box, number in the box) of the tiles `first[b]` to `end[b]` of each box."""
    each = end - first
    box = np.repeat(np.arange(len(each), dtype=np.int32), each)
    begin = np.cumsum(each) - each
    within = np.arange(int(each.sum()), dtype=np.int64) - np.repeat(begin - first, each)
    return box, within.astype(np.int32)
