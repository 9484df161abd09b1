"""Which ranks of a group's servers take part in one step, as a mesh that M2N can be given."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout.tensors import Replicate, Shard
from .steps import Side


def targets_of(
    first_rank: int, servers: int, server: int, units: range, width: int, axis: int, at_once: int
) -> Iterator[Side]:
    """The target sides that together are those units of all servers, `at_once` or fewer servers at a time.

    Servers of `server` ranks each follow each other from `first_rank` on; `width` ranks of a unit take the same, and
    `axis` is cut into the units.
    """
    mesh: tuple[int, ...]
    placements: tuple[Replicate | Shard, ...]
    whole = len(units) * width == server
    if not whole or (len(units) > 1 and width > 1):
        at_once = 1  # the ranks of several servers would be no interval, or three mesh dimensions
    for first in range(0, servers, at_once):
        many = min(at_once, servers - first)
        rank = first_rank + first * server + units[0] * width
        if len(units) == 1:
            n = many * width
            # Replicated is spelled with a cut over one rank: a mesh without a shard axis is not supported.
            mesh, placements = ((n, 1), (Replicate(), Shard(axis))) if n > 1 else ((1,), (Shard(axis),))
        elif many > 1:
            mesh, placements = (many, len(units)), (Replicate(), Shard(axis))
        elif width > 1:
            mesh, placements = (len(units), width), (Shard(axis), Replicate())
        else:
            mesh, placements = (len(units),), (Shard(axis),)
        yield Side(rank, mesh, placements)
