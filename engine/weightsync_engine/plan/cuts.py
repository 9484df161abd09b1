"""Who holds and who wants which elements of one parameter: the boxes of both sides laid over each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import SourceParameter


@dataclass(frozen=True, slots=True)
class Held:
    """One distinct box of a source parameter and the trainer ranks that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A piece of the parameter on the worker at `position` of a server. A worker may hold a box more than
    once (two storages): `turn` counts them."""

    position: int
    turn: int
    box: Box


Unit = tuple[int, int]
"""(width, index): the workers at positions `[index * width, (index + 1) * width)` of a server."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Elements that the same trainer ranks hold and the same workers of a server want."""

    box: Box
    ranks: tuple[int, ...]
    turn: int
    wanted: Box
    """The place's box that it is part of."""
    units: tuple[Unit, ...]
    """The workers that want it, each once."""
    receivers: int
    """Workers of one server that want it."""
    elements: int


def holders(source: SourceParameter) -> tuple[Held, ...]:
    """The distinct boxes of a source, in the parameter's own indices, each with the ranks that hold it."""
    ranks: dict[Box, list[int]] = {}
    region, drop = source.region, len(source.tensor_shape) - len(source.shape)
    for rank, held in shard_boxes(source).items():
        box = held.intersect(region) if held is not None else None
        if box is not None and box.size:
            box = box.relative_to(region.start)
            ranks.setdefault(Box(box.start[drop:], box.shape[drop:]), []).append(rank)
    return tuple(Held(box, tuple(sorted(ranks[box]))) for box in sorted(ranks))


class Holders:
    """`holders`, worked out once for sources that are laid out alike, with equal results as one object."""

    def __init__(self) -> None:
        self._by_layout: dict[object, tuple[tuple[Held, ...], object]] = {}
        self._equal: dict[tuple[Held, ...], tuple[Held, ...]] = {}

    def __call__(self, source: SourceParameter) -> tuple[Held, ...]:
        within = source.within
        layout = (id(source.mesh), source.placements, source.shape, within and (within.shape, within.at))
        if layout not in self._by_layout:
            held = holders(source)
            # The mesh is kept, so that its id stays its own.
            self._by_layout[layout] = self._equal.setdefault(held, held), source.mesh
        return self._by_layout[layout][0]


def overlay(held: Sequence[Held], places: Sequence[Place], width: int, widest: int) -> tuple[Cut, ...]:
    """All cuts of one parameter for servers of `width` workers, in order of elements.

    Workers that want the same are taken together in units of at most `widest` neighbours.
    """
    wanted: dict[tuple[Box, int], list[int]] = {}
    for place in places:
        wanted.setdefault((place.box, place.turn), []).append(place.position)
    cuts: list[Cut] = []
    for (box, turn), positions in sorted(wanted.items()):
        units = units_of(positions, width, widest)
        for h in held:
            common = h.box.intersect(box)
            if common is not None:
                cuts.append(Cut(common, h.ranks, turn, box, units, len(positions), common.size))
    return tuple(cuts)


def units_of(positions: Sequence[int], width: int, widest: int) -> tuple[Unit, ...]:
    """Positions as equally wide blocks of neighbours that tile a server; single ones where they are none."""
    ordered = sorted(positions)
    n = len(ordered)
    for block in range(min(n, widest), 1, -1):
        if width % block or n % block:
            continue
        starts = ordered[::block]
        if all(s % block == 0 for s in starts) and ordered == [s + i for s in starts for i in range(block)]:
            return tuple((block, s // block) for s in starts)
    return tuple((1, p) for p in ordered)


def copies(places: Sequence[Place], shape: tuple[int, ...]) -> dict[Box, set[int]]:
    """By how many places the elements of each place's box are covered: all numbers that occur. Elements that no place
    has are counted, 0 times, under the box of the whole parameter."""
    boxes = [p.box for p in places]
    whole = Box.whole(shape)
    if all(b == whole for b in boxes):
        return {whole: {len(boxes)}}
    cuts = [
        sorted({0, n, *(b.start[d] for b in boxes), *(b.stop[d] for b in boxes)}) for d, n in enumerate(shape)
    ]
    counts: dict[Box, set[int]] = {}
    for cell in itertools.product(*(list(itertools.pairwise(c)) for c in cuts)):
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        around = [b for b in boxes if b.contains(box)]
        for b in around or [whole]:
            counts.setdefault(b, set()).add(len(around))
    return counts
