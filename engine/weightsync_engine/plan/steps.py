"""Steps in the terms of `nccl.m2n`: what goes from a run of trainer ranks to a run of workers in one reshard.

A *stack* is parameters that both sides cut alike, one on the other: its tensor is theirs, and each rank's share of it
is what the rank holds of them, which lies in one run where the slab holds them one after the other.

What is no stack goes by flows. Between a sender and a unit of workers runs one *flow*: all elements of one dtype that
the sender has for them, in the plan's order. A step of *blocks* moves the next block of several flows at once. Its
tensor is made of whole blocks; each rank's share of it is packed from, and unpacked to, the parts of parameters that
the flow consists of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..layout.boxes import Box
from ..layout.tensors import DTYPE_BYTES, Replicate, Shard
from ..protocol.messages import Problem


class PlanError(Exception):
    """No plan can be made. The problem names the parameter, what is wrong and the rank to blame."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a step: ranks `[first_rank, first_rank + prod(mesh))`, row-major, with exactly one
    `Shard`."""

    first_rank: int
    mesh: tuple[int, ...]
    placements: tuple[Replicate | Shard, ...]

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

    @property
    def copies(self) -> int:
        """How many ranks hold each shard."""
        return math.prod(self.mesh) // self.shards

    def shard_of(self, index: int) -> int:
        """Which shard the rank at `index` of the interval holds."""
        if len(self.mesh) == 1:
            return index
        outer, inner = divmod(index, self.mesh[1])
        return outer if isinstance(self.placements[0], Shard) else inner

    def local_box(self, shape: tuple[int, ...], index: int) -> Box:
        """The box of the step's tensor that the rank at `index` of the interval holds."""
        size = shape[self.axis] // self.shards
        start = [0] * len(shape)
        start[self.axis] = size * self.shard_of(index)
        return Box(tuple(start), (*shape[: self.axis], size, *shape[self.axis + 1 :]))


@dataclass(frozen=True, slots=True)
class FlowKey:
    """All elements of one dtype from one trainer rank to one unit of workers, in every server of a group."""

    group: int
    dtype: str
    width: int
    """Workers of a unit: neighbours that take the same."""
    sender: int
    unit: int


@dataclass(frozen=True, slots=True)
class Step:
    """One reshard of a tensor of that shape from the source's ranks to the target's."""

    group: int
    dtype: str
    shape: tuple[int, ...]
    source: Side
    target: Side

    def share(self, sends: bool) -> int:
        """Elements of a source's or a target's share."""
        return math.prod(self.shape) // (self.source if sends else self.target).shards

    @property
    def bytes_sent(self) -> int:
        """By all sources together, each copy counted."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype] * self.target.copies


@dataclass(frozen=True, slots=True)
class Stack(Step):
    """One reshard of like parameters, or of a part of one.

    Shape `(parameters, ...)`, the dimensions of a parameter taken together where neither side cuts one. Dimensions
    before the first cut are taken together with the parameters.
    """

    routes: tuple[int, ...]
    """In the plan's routes, in the stack's order."""
    parameter: tuple[int, ...]
    """The shape of each."""
    axes: tuple[int, int]
    """Which of its dimensions sources and targets cut."""
    part: int = 0
    parts: int = 1
    """Only every `parts`-th part of each run of rows that goes from one source to one target, where that is not 1:
    both sides cut the same dimension then."""

    def boxes(self, sends: bool, index: int) -> list[Box]:
        """What the rank at `index` of a side holds of each parameter in this step, in order."""
        side, axis = (self.source if sends else self.target), self.axes[0 if sends else 1]
        extent, shard = self.parameter[axis], side.shard_of(index)
        runs = math.lcm(self.source.shards, self.target.shards) if self.parts > 1 else side.shards
        each, mine = extent // runs, runs // side.shards
        rows = each // self.parts
        found: list[Box] = []
        for run in range(shard * mine, (shard + 1) * mine):
            start = [0] * len(self.parameter)
            start[axis] = run * each + self.part * rows
            found.append(Box(tuple(start), (*self.parameter[:axis], rows, *self.parameter[axis + 1 :])))
        return found

    def peers(self, sends: bool, index: int) -> tuple[int, ...]:
        """The ranks at the other end of what the rank at `index` of a side holds, ascending."""
        side, other = (self.source, self.target) if sends else (self.target, self.source)
        held = side.local_box(self.shape, index)
        return tuple(
            rank
            for i, rank in enumerate(other.ranks)
            if held.intersect(other.local_box(self.shape, i)) is not None
        )


@dataclass(frozen=True, slots=True)
class Blocks(Step):
    """One reshard of a tensor of blocks.

    Shape `(blocks, block)`, both sides cutting dimension 0: stepped. Shape `(senders, units, block)`, the
    source cutting dimension 0 and the target dimension 1: crossed.
    """

    width: int
    first_unit: int
    starts: tuple[int, ...]
    """Of each block, row-major: which element of its flow it begins with."""

    @property
    def block(self) -> int:
        """Elements of one block."""
        return self.shape[-1]

    def flow(self, block: int) -> FlowKey:
        """The flow that a block (in row-major order) is part of."""
        n, senders = len(self.starts), len(self.source.ranks)
        sender = block * senders // n
        units = self.target.shards
        unit = block % units if len(self.shape) == 3 else block * units // n
        return FlowKey(
            self.group, self.dtype, self.width, self.source.first_rank + sender, self.first_unit + unit
        )

    def sent_blocks(self, rank: int) -> range:
        """The blocks of the share that a source rank holds, in the share's order."""
        each = len(self.starts) // len(self.source.ranks)
        first = (rank - self.source.first_rank) * each
        return range(first, first + each)

    def received_blocks(self, rank: int) -> range:
        """The blocks of the share that a target rank holds, in the share's order."""
        n, units = len(self.starts), self.target.shards
        unit = self.target.shard_of(rank - self.target.first_rank)
        return (
            range(unit, n, units)
            if len(self.shape) == 3
            else range(unit * n // units, (unit + 1) * n // units)
        )

    def receivers(self, block: int) -> tuple[int, ...]:
        """The target ranks that take a block, ascending."""
        unit = self.flow(block).unit - self.first_unit
        target = self.target
        return tuple(r for i, r in enumerate(target.ranks) if target.shard_of(i) == unit)
