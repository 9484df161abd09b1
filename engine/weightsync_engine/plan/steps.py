"""A plan: ordered steps in the terms of `nccl.m2n`, and where each rank's part of each step lives in its
slab.

A step moves one box of one parameter from a contiguous interval of trainer ranks to a contiguous interval of
workers. Its tensor is the box, seen in at most three dimensions; each side cuts it along exactly one axis,
evenly, over a 1-D or 2-D mesh. Every rank makes the steps in the plan's order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from ..layout.boxes import Box
from ..layout.tensors import DTYPE_BYTES, Replicate, Shard
from ..protocol.messages import PlanSummary, Problem


class PlanError(Exception):
    """No plan can be made. The problem names the parameter, what is wrong and the rank to blame."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A rank's share of a step: region `box` of slab tensor `tensor`, in row-major order of that region.

    `staged`: the region is no contiguous run of the slab; it is packed before it is sent, unpacked after it
    came.
    """

    tensor: str
    box: Box
    staged: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a step: ranks `[first_rank, first_rank + prod(mesh))`, row-major, with exactly one
    `Shard`."""

    first_rank: int
    mesh: tuple[int, ...]
    placements: tuple[Replicate | Shard, ...]
    parts: tuple[LocalPart, ...]
    """Of each rank of the interval, in order."""

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + math.prod(self.mesh))

    @property
    def axis(self) -> int:
        """The tensor dimension that is cut."""
        return next(p.dim for p in self.placements if isinstance(p, Shard))

    @property
    def shards(self) -> int:
        """Into how many parts the tensor is cut."""
        return next(n for n, p in zip(self.mesh, self.placements, strict=True) if isinstance(p, Shard))

    def shard_of(self, index: int) -> int:
        """Which shard the rank at `index` of the interval holds."""
        if len(self.mesh) == 1:
            return index
        outer, inner = divmod(index, self.mesh[1])
        return outer if isinstance(self.placements[0], Shard) else inner

    def replica_of(self, index: int) -> int:
        """Which copy of its shard the rank at `index` of the interval holds."""
        if len(self.mesh) == 1:
            return 0
        outer, inner = divmod(index, self.mesh[1])
        return inner if isinstance(self.placements[0], Shard) else outer

    def local_box(self, shape: tuple[int, ...], index: int) -> Box:
        """The box of the step's tensor that the rank at `index` of the interval holds."""
        size = shape[self.axis] // self.shards
        start = [0] * len(shape)
        start[self.axis] = size * self.shard_of(index)
        return Box(tuple(start), (*shape[: self.axis], size, *shape[self.axis + 1 :]))


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    """Checkpoint parameter as the trainer names it."""
    box: Box
    """The elements of the parameter that the step moves."""
    shape: tuple[int, ...]
    """The step's tensor: the box with neighbouring dimensions joined, 1 to 3 dimensions."""
    dtype: str
    source: Side
    target: Side

    @property
    def bytes_received(self) -> int:
        """By all targets together, copies included."""
        copies = len(self.target.ranks) // self.target.shards
        return self.box.size * DTYPE_BYTES[self.dtype] * copies


@dataclass(frozen=True, slots=True)
class Copies:
    """How often each element of a parameter lives in one server."""

    server: str
    ranks: tuple[int, ...]
    """The server's workers, ascending."""
    count: int


@dataclass(frozen=True)
class Plan:
    """What every rank does in a round. Equal plans have equal digests, whatever order their inputs came
    in."""

    trainer_ranks: int
    world_size: int
    steps: tuple[Step, ...]
    copies: dict[str, tuple[Copies, ...]]
    """Per parameter that is written: its copies in each server, for verification."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameters that are not sent because another one, which is, fills the same storage: they must be
    equal."""

    @cached_property
    def digest(self) -> str:
        """blake2b over the canonical form, hex."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._canonical():
            digest.update(json.dumps(part, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()

    def _canonical(self) -> Iterator[object]:
        def side(s: Side) -> object:
            placements = [f"S{p.dim}" if isinstance(p, Shard) else "R" for p in s.placements]
            parts = [[p.tensor, p.box.start, p.box.shape, p.staged] for p in s.parts]
            return [s.first_rank, s.mesh, placements, parts]

        yield ["weightsync plan 1", self.trainer_ranks, self.world_size, len(self.steps)]
        for s in self.steps:
            yield [s.name, s.box.start, s.box.shape, s.shape, s.dtype, side(s.source), side(s.target)]
        for name in sorted(self.copies):
            yield [name, [[c.server, c.ranks, c.count] for c in self.copies[name]]]
        yield sorted(self.tied.items())

    @cached_property
    def summary(self) -> PlanSummary:
        return PlanSummary(
            digest=self.digest,
            parameters=len(self.copies) + len(self.tied),
            direct=len(self.copies) + len(self.tied),
            fallback=0,
            bytes_total=sum(s.bytes_received for s in self.steps),
            steps=len(self.steps),
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """Elements that go from one rank to another within a step. Boxes count in the ranks' own parts, same
    shape."""

    source: int
    target: int
    source_box: Box
    target_box: Box


def exchanges(step: Step) -> Iterator[Exchange]:
    """Who sends what to whom, for transports that know no meshes. Each target element comes from one source.

    Of a replicated source, copy `i mod copies` serves the i-th rank of the target.
    """
    source, target = step.source, step.target
    pairs = _pairs(step.shape, source.mesh, source.placements, target.mesh, target.placements)
    for s, t, held, wanted in pairs:
        yield Exchange(source.first_rank + s, target.first_rank + t, held, wanted)


@lru_cache(maxsize=4096)  # the layers of a model are alike
def _pairs(
    shape: tuple[int, ...],
    source_mesh: tuple[int, ...],
    source_placements: tuple[Replicate | Shard, ...],
    target_mesh: tuple[int, ...],
    target_placements: tuple[Replicate | Shard, ...],
) -> tuple[tuple[int, int, Box, Box], ...]:
    source = Side(0, source_mesh, source_placements, ())
    target = Side(0, target_mesh, target_placements, ())
    copies = len(source.ranks) // source.shards
    held = [(s, source.replica_of(s), source.local_box(shape, s)) for s in range(len(source.ranks))]
    pairs: list[tuple[int, int, Box, Box]] = []
    for t in range(len(target.ranks)):
        wanted = target.local_box(shape, t)
        for s, replica, box in held:
            common = box.intersect(wanted) if replica == t % copies else None
            if common is not None:
                pairs.append((s, t, common.relative_to(box.start), common.relative_to(wanted.start)))
    return tuple(pairs)
