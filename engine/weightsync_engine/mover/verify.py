"""Digests of what this rank holds, and rank 0's judgement over those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..digest import MODULUS, box_digests
from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import Mesh, Placement, SourceParameter, WorkerManifest
from ..plan.cuts import Holders
from ..plan.plan import LocalPart, Plan
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
        part = LocalPart(source.tensor, inside.relative_to(shard.start))
        yield source, part, Box(of_parameter.start[leading:], of_parameter.shape[leading:])


def target_sums(
    manifest: WorkerManifest, local: LocalTensor, weights: Mapping[str, Mapping[Box, int]]
) -> Sums:
    """Of everything that a worker's shadow holds, by its own names; what it holds twice counts twice, and what has a
    weight (`Plan.weights`) as often as that says."""
    pieces = [piece for piece in manifest.pieces if piece.box.size]

    def tensors() -> Iterator[tuple[torch.Tensor, Box, tuple[int, ...]]]:
        for piece in pieces:
            region = local(LocalPart(piece.tensor, piece.region)).reshape(piece.box.shape)
            yield region, piece.box, manifest.expected[piece.name].shape

    sums: Sums = {}
    for piece, value in zip(pieces, box_digests(tensors()), strict=True):
        often = weights.get(piece.name, {}).get(piece.box, 1)
        sums[piece.name] = (sums.get(piece.name, 0) + often * value) % MODULUS
    return sums


def judge_digests(words: Sequence[Sums], sources: Sequence[SourceParameter], plan: Plan) -> Problem | None:
    """Every server must hold each parameter as often as planned, bit for bit as the trainer sent it.

    `words` holds each rank's sums. Replicas inside the trainer must be equal too, and so must parameters that
    share one storage in the servers.
    """
    sent: Sums = {}
    holders_of = Holders()
    for source in sources:
        total = 0
        for held in holders_of(source):
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
    for route in plan.routes:
        group, wanted = plan.groups[route.group], route.copies * sent[route.source.name] % MODULUS
        for replica, server in enumerate(group.servers):
            ranks = group.server_ranks(replica)
            if sum(words[r].get(route.name, 0) for r in ranks) % MODULUS != wanted:
                return Problem(
                    reason="DigestMismatch",
                    message=f"{route.source.name!r} did not arrive bit for bit in server {server!r} (ranks "
                    f"{ranks[0]} to {ranks[-1]}); nothing was made live, and the round can be repeated",
                    rank=ranks[0],
                )
    return None
