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
        sent, received = (step.share(sends) * DTYPE_BYTES[step.dtype] for sends in (True, False))
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
        for s, sender in enumerate(step.source.ranks):
            held = step.source.local_box(step.shape, s)
            for t, receiver in enumerate(step.target.ranks):
                common = held.intersect(step.target.local_box(step.shape, t))
                if common is not None:
                    size = common.size * DTYPE_BYTES[step.dtype]
                    found[sender, receiver] = found.get((sender, receiver), 0) + size
    return dict(sorted(found.items()))
