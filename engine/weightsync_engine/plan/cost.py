"""What a plan asks of each rank: bytes, steps, memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout.tensors import DTYPE_BYTES
from .plan import Plan


@dataclass(slots=True)
class RankCost:
    """Of one rank, in one round."""

    bytes_sent: int = 0
    """Each receiver counted."""
    bytes_received: int = 0
    steps: int = 0
    staging_bytes: int = 0
    """The largest share of one step: what a transport that packs needs, as often as it has steps in
    flight."""


def rank_costs(plan: Plan) -> list[RankCost]:
    """By rank."""
    costs = [RankCost() for _ in range(plan.world_size)]
    for step in plan.steps:
        total = len(step.starts) * step.block * DTYPE_BYTES[step.dtype]
        sent, received = total // step.source.shards, total // step.target.shards
        for rank in step.source.ranks:
            cost = costs[rank]
            cost.bytes_sent += sent * step.target.copies
            cost.steps += 1
            cost.staging_bytes = max(cost.staging_bytes, sent)
        for rank in step.target.ranks:
            cost = costs[rank]
            cost.bytes_received += received
            cost.steps += 1
            cost.staging_bytes = max(cost.staging_bytes, received)
    return costs


def links(plan: Plan) -> dict[tuple[int, int], int]:
    """Bytes by (sender, receiver)."""
    found: dict[tuple[int, int], int] = {}
    for step in plan.steps:
        size = step.block * DTYPE_BYTES[step.dtype]
        for block in range(len(step.starts)):
            sender = step.flow(block).sender
            for receiver in step.receivers(block):
                found[sender, receiver] = found.get((sender, receiver), 0) + size
    return dict(sorted(found.items()))
