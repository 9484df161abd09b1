"""How boxes are cut into tiles for one launch over all of them: plain arrays, no GPU.

Elements of a box lie one after the other in memory. A box is described by at most two joined dimensions: element
`p` has the index `(p // extent + outer) * whole + p % extent + start` in its parameter; with `extent` 0 it is one run,
`p + start`.
"""

from __future__ import annotations

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
    """Work of one launch: tile `t` is the `within[t]`-th of box `box[t]`; `whole` ones are full and aligned."""

    rows: NDArray[np.int64]
    """[boxes, FIELDS]."""
    box: NDArray[np.int32]
    within: NDArray[np.int32]
    whole: int
    """The first so many tiles."""


def cut(boxes: Sequence[Boxed]) -> Tiles:
    """Tiles of boxes of one element width; none for a box without elements."""
    rows = np.array([b.row() for b in boxes], dtype=np.int64).reshape(len(boxes), len(FIELDS))
    count = rows[:, 1]
    aligned = rows[:, 0] % FAST_ALIGNMENT == 0
    tiles = -(-count // TILE)
    full = np.where(aligned, count // TILE, 0)
    numbers = np.arange(len(boxes), dtype=np.int32)

    def spread(
        first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        each = last - first
        box = np.repeat(numbers, each)
        begin = np.cumsum(each) - each
        within = np.arange(int(each.sum()), dtype=np.int64) - np.repeat(begin - first, each)
        return box, within.astype(np.int32)

    fast, rest = spread(np.zeros_like(full), full), spread(full, tiles)
    return Tiles(
        rows, np.concatenate([fast[0], rest[0]]), np.concatenate([fast[1], rest[1]]), int(full.sum())
    )
