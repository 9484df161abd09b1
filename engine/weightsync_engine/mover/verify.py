"""Digests of what this rank holds, and rank 0's judgement over those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..digest import MODULUS, box_digest, box_digests
from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import Mesh, Placement, SourceParameter
from ..plan.compile import holders
from ..plan.steps import LocalPart, Plan
from ..protocol.messages import Problem
from ..transport.base import LocalTensor

Sums = dict[str, int]
"""Per parameter the digest of what one rank holds of it; parameters of which it holds nothing are absent."""


def source_sums(sources: Sequence[SourceParameter], rank: int, local: LocalTensor) -> Sums:
    """Of what a trainer rank's shards hold of each checkpoint parameter, elements counted in the parameter."""
    held = list(_held(sources, rank))

    def tensors() -> Iterator[tuple[torch.Tensor, Box, tuple[int, ...]]]:
        for source, part, box in held:
            yield local(part).reshape(box.shape), box, source.shape

    return dict(zip((source.name for source, _, _ in held), box_digests(tensors()), strict=True))


def shards_of(sources: Iterable[SourceParameter], rank: int) -> Iterator[tuple[SourceParameter, Box | None]]:
    """Each source with the box of the trainer's tensor that a trainer rank holds. Raises `LayoutError`."""
    # Thousands of parameters share few layouts, whose meshes may have thousands of ranks.
    shards: dict[tuple[Mesh, tuple[Placement, ...], tuple[int, ...]], Box | None] = {}
    for source in sources:
        layout = (source.mesh, source.placements, source.tensor_shape)
        if layout not in shards:
            shards[layout] = shard_boxes(source).get(rank)
        yield source, shards[layout]


def _held(sources: Sequence[SourceParameter], rank: int) -> Iterator[tuple[SourceParameter, LocalPart, Box]]:
    """What a trainer rank holds: parameter, where it is in the snapshot, which elements of the parameter it is."""
    for source, shard in shards_of(sources, rank):
        region = source.region
        inside = shard.intersect(region) if shard is not None else None
        if shard is None or inside is None:
            continue
        leading = len(region.shape) - len(source.shape)
        of_parameter = inside.relative_to(region.start)
        part = LocalPart(source.tensor, inside.relative_to(shard.start), False)
        yield source, part, Box(of_parameter.start[leading:], of_parameter.shape[leading:])


def target_sums(plan: Plan, sources: Sequence[SourceParameter], rank: int, local: LocalTensor) -> Sums:
    """Of everything that the plan has written on a worker, copies counted as often as they are held."""
    sums: Sums = {}
    shapes = {s.name: s.shape for s in sources}
    for step in plan.steps:
        if rank not in step.target.ranks:
            continue
        index = rank - step.target.first_rank
        region = local(step.target.parts[index])
        if len(step.target.ranks) == 1 or step.target.shards == 1:
            value = box_digest(region.reshape(step.box.shape), step.box, shapes[step.name])
        else:
            # Steps that cut their target move whole parameters; joined dimensions keep an element's linear
            # index.
            box = step.target.local_box(step.shape, index)
            value = box_digest(region.reshape(box.shape), box, step.shape)
        sums[step.name] = (sums.get(step.name, 0) + value) % MODULUS
    return sums


def judge_digests(words: Sequence[Sums], sources: Sequence[SourceParameter], plan: Plan) -> Problem | None:
    """Every server must hold each parameter as often as planned, bit for bit as the trainer sent it.

    `words` holds each rank's sums. Replicas inside the trainer must be equal too, and so must parameters that
    share one storage in the servers.
    """
    sent: Sums = {}
    for source in sources:
        total = 0
        for held in holders(source):
            values = [words[r].get(source.name) for r in held.ranks]
            for rank, value in zip(held.ranks, values, strict=True):
                if value is None or value != values[0]:
                    return Problem(
                        reason="ReplicasDiffer",
                        message=f"{source.name!r}: trainer ranks {held.ranks[0]} and {rank} should "
                        f"hold the same "
                        "elements, but their bits differ",
                        rank=rank,
                    )
            total += values[0] or 0
        sent[source.name] = total % MODULUS
    for name in sorted(plan.tied):
        other = plan.tied[name]
        if sent[name] != sent[other]:
            return Problem(
                reason="TiedDiffer",
                message=f"{name!r} and {other!r} share one storage in the servers, but the trainer "
                f"holds different "
                "values for them: tie them in the trainer or untie them in the served model",
            )
    for name in sorted(plan.copies):
        for copies in plan.copies[name]:
            arrived = sum(words[r].get(name, 0) for r in copies.ranks) % MODULUS
            if arrived != copies.count * sent[name] % MODULUS:
                return Problem(
                    reason="DigestMismatch",
                    message=f"{name!r} did not arrive bit for bit in server {copies.server!r} (ranks "
                    f"{copies.ranks[0]} to {copies.ranks[-1]}); nothing was made live, and the "
                    f"round can be repeated",
                    rank=copies.ranks[0],
                )
    return None
