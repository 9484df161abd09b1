"""Digests of what this rank holds, and rank 0's judgement over those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..digest import MODULUS, box_digest
from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import SourceParameter, WorkerManifest
from ..plan.cuts import Holders
from ..plan.plan import LocalPart, Plan
from ..protocol.messages import Problem
from ..transport.base import LocalTensor

Sums = dict[str, int]
"""Per parameter the digest of what one rank holds of it; parameters of which it holds nothing are absent."""


def source_sums(sources: Sequence[SourceParameter], rank: int, local: LocalTensor) -> Sums:
    """Of a trainer rank's shards."""
    sums: Sums = {}
    for source in sources:
        box = shard_boxes(source).get(rank)
        if box is not None:
            part = LocalPart(source.name, Box.whole(box.shape))
            sums[source.name] = box_digest(local(part), box, source.shape)
    return sums


def target_sums(manifest: WorkerManifest, local: LocalTensor) -> Sums:
    """Of everything that a worker's shadow holds, by its own names; what it holds twice counts twice."""
    sums: Sums = {}
    for piece in manifest.pieces:
        if piece.box.size:
            region = local(LocalPart(piece.tensor, piece.region)).reshape(piece.box.shape)
            value = box_digest(region, piece.box, manifest.expected[piece.name].shape)
            sums[piece.name] = (sums.get(piece.name, 0) + value) % MODULUS
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
