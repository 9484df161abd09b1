"""Digests of what this rank holds, and rank 0's judgement over those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..digest import MODULUS, Digests
from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import Mesh, Placement, SourceParameter, WorkerManifest
from ..plan.cuts import Holders
from ..plan.plan import LocalPart, Plan
from ..protocol.messages import Problem
from ..transport.base import LocalTensor

Sums = dict[str, int]
"""Per parameter the digest of what one rank holds of it; parameters of which it holds nothing are absent."""


class Summed:
    """What one rank sums: parameters and where they are, worked out once for an epoch."""

    def __init__(self, names: list[str], digests: Digests) -> None:
        self._names, self._digests = names, digests

    def sums(self) -> Sums:
        """Of what is there now; a parameter that is there twice counts twice."""
        sums: Sums = {}
        for name, value in zip(self._names, self._digests.sums(), strict=True):
            sums[name] = (sums.get(name, 0) + value) % MODULUS
        return sums


def of_sources(sources: Sequence[SourceParameter], rank: int, local: LocalTensor) -> Summed:
    """What a trainer rank's shards hold of each checkpoint parameter, elements counted in the parameter."""
    held = list(_held(sources, rank))
    boxes = ((local(part).view(box.shape), box, source.shape) for source, part, box in held)
    return Summed([source.name for source, _, _ in held], Digests(boxes))


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


def of_targets(manifest: WorkerManifest, local: LocalTensor) -> Summed:
    """Everything that a worker's shadow holds, by its own names."""
    pieces = [piece for piece in manifest.pieces if piece.box.size]
    boxes = (
        (
            local(LocalPart(piece.tensor, piece.region)).view(piece.box.shape),
            piece.box,
            manifest.expected[piece.name].shape,
        )
        for piece in pieces
    )
    return Summed([piece.name for piece in pieces], Digests(boxes))


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
