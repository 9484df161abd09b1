"""Steps in the terms of `nccl.m2n`: equal blocks that go from a run of trainer ranks to a run of workers.

Between a sender and a unit of workers runs one *flow*: all elements of one dtype that the sender has for them,
in the plan's order. A step moves the next block of several flows at once. Its tensor is made of whole blocks;
each rank's share of it is packed from, and unpacked to, the parts of parameters that the flow consists of.
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
    """One reshard of a tensor of blocks.

    Shape `(blocks, block)`, both sides cutting dimension 0: stepped. Shape `(senders, units, block)`, the
    source cutting dimension 0 and the target dimension 1: crossed.
    """

    group: int
    dtype: str
    shape: tuple[int, ...]
    source: Side
    target: Side
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

    @property
    def bytes_sent(self) -> int:
        """By all sources together, each copy counted."""
        return len(self.starts) * self.block * DTYPE_BYTES[self.dtype] * self.target.copies
