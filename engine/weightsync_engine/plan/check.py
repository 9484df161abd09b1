"""Everything that can be wrong with sources and workers before layouts are matched, told by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..layout.boxes import Box
from ..layout.shards import LayoutError, check_source
from ..layout.tensors import DTYPE_BYTES, Expected, Piece, SlabTensor, SourceParameter
from ..protocol.messages import Problem
from ..protocol.names import DRAFT_PREFIX, ENV_DRAFT_MODEL, FROZEN, UPDATE
from .groups import Worker
from .steps import PlanError

DRAFT_NOT_SENT = (
    f"publish the draft model's parameters too ({ENV_DRAFT_MODEL}={UPDATE}, the default), or set "
    f"{ENV_DRAFT_MODEL}={FROZEN} on the servers: their draft model keeps its weights then, and fewer of its tokens "
    "are accepted with each version"
)


def problem(reason: str, message: str, rank: int | None = None) -> Problem:
    return Problem(reason=reason, message=message[:1024], rank=rank)


def check(
    sources: Sequence[SourceParameter], workers: Sequence[Worker], trainer_ranks: int
) -> dict[str, SourceParameter]:
    """The sources by name. Raises `PlanError` with the first problem and the number of further ones.

    `workers` come in order of rank.
    """
    problems = list(itertools.chain(_check_world(sources, workers, trainer_ranks)))
    by_name = {s.name: s for s in sources}
    if not problems:
        checked: set[int] = set()
        good = _Good()
        for worker in workers:
            if id(worker.manifest) not in checked:  # of servers that are alike, the first is named
                checked.add(id(worker.manifest))
                problems += _check_worker(worker, by_name, good)
        problems += _check_servers(by_name, workers)
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PlanError(problem(first.reason, first.message[: 1024 - len(more)] + more, first.rank))
    return by_name


def _check_world(
    sources: Sequence[SourceParameter], workers: Sequence[Worker], trainer_ranks: int
) -> Iterator[Problem]:
    if not sources:
        yield problem("NoParameters", "the trainer sends no parameters at all", 0)
    ranks = [w.rank for w in workers]
    if not ranks or ranks != list(range(trainer_ranks, trainer_ranks + len(ranks))):
        yield problem("WorldSize", f"workers have ranks {ranks}, not those after {trainer_ranks} trainers")
    parted = [
        s for s, n in Counter(s for s, _ in itertools.groupby(w.server for w in workers)).items() if n > 1
    ]
    if parted:
        yield problem("WorldSize", f"the ranks of server {parted[0]!r} are not neighbours")
    seen: set[str] = set()
    good: set[tuple[object, ...]] = set()
    for source in sorted(sources, key=lambda s: s.name):
        if source.name in seen:
            yield problem("BadSource", f"the trainer gives {source.name!r} twice", 0)
        seen.add(source.name)
        layout = (id(source.mesh), source.placements, source.shape, source.dtype, source.within)
        if layout in good:
            continue
        if source.dtype not in DTYPE_BYTES:
            yield problem("BadSource", f"{source.name!r}: dtype {source.dtype!r} cannot travel", 0)
        try:
            check_source(source)
        except LayoutError as e:
            yield problem("BadSource", str(e), 0)
            continue
        outside = max(source.mesh.ranks)
        if outside >= trainer_ranks:
            yield problem(
                "WorldSize",
                f"{source.name!r} lives on trainer ranks up to {outside}, but the epoch has {trainer_ranks} "
                "trainer ranks: all ranks of the trainer must be members",
                0,
            )
        good.add(layout)


@dataclass
class _Good:
    """Layouts that were found right. Layers are alike and workers nearly so: most need no second look."""

    pieces: set[object] = field(default_factory=set)
    tensors: set[object] = field(default_factory=set)


def _check_worker(worker: Worker, sources: dict[str, SourceParameter], good: _Good) -> Iterator[Problem]:
    manifest, who = worker.manifest, f"rank {worker.rank} (server {worker.server!r})"
    for name, reason in sorted(manifest.unresolved.items()):
        yield problem("Unresolved", f"{name!r} cannot be written on {who}: {reason}", worker.rank)
    filled_by_alias = {n for a, n in manifest.aliases.items() if a in sources}
    for name, expected in sorted(manifest.expected.items()):
        source = sources.get(name)
        if source is None:
            if name not in manifest.aliases and name not in filled_by_alias:
                by = f"{who} for its draft model" if name in manifest.draft else who
                what_to_do = f"; {DRAFT_NOT_SENT}" if name in manifest.draft else ""
                yield problem(
                    "NotSent",
                    f"{name!r} is expected by {by}, but the trainer does not send it{what_to_do}",
                    worker.rank,
                )
            continue
        if (source.shape, source.dtype) != (expected.shape, expected.dtype):
            yield _unlike(source, name, expected.shape, expected.dtype, who, worker.rank)
    for alias, name in sorted(manifest.aliases.items()):
        source, want = sources.get(alias), manifest.expected.get(name)
        if source is None or want is None or alias in manifest.expected:
            continue
        if (source.shape, source.dtype) != (want.shape, want.dtype):
            yield _unlike(source, alias, want.shape, want.dtype, who, worker.rank)
    yield from _check_pieces(worker, who, good)


def _unlike(
    source: SourceParameter, name: str, shape: tuple[int, ...], dtype: str, who: str, rank: int
) -> Problem:
    if source.shape != shape:
        return problem(
            "ShapeDiffers", f"{name!r}: the trainer sends shape {source.shape}, {who} has {shape}", rank
        )
    return problem(
        "DtypeDiffers",
        f"{name!r}: the trainer sends {source.dtype}, {who} has {dtype}; set the wire dtype to {dtype}",
        rank,
    )


def _check_pieces(worker: Worker, who: str, good: _Good) -> Iterator[Problem]:
    manifest = worker.manifest
    by_tensor: dict[str, list[Piece]] = {}
    for piece in sorted(manifest.pieces, key=lambda p: (p.name, p.tensor)):
        place, expected, box = (
            manifest.tensors.get(piece.tensor),
            manifest.expected.get(piece.name),
            piece.box,
        )
        if place is None or expected is None:
            lacking = f"slab tensor {piece.tensor!r}" if place is None else "an expected shape"
            yield problem("BadManifest", f"{piece.name!r} on {who}: its piece has no {lacking}", worker.rank)
            continue
        layout = box.start, box.shape, piece.at, place.shape, place.dtype, expected.shape, expected.dtype
        if layout not in good.pieces:
            wrong = _misplaced(piece, place, expected)
            if wrong:
                yield problem("BadManifest", f"{piece.name!r} on {who}: {wrong}", worker.rank)
                continue
            good.pieces.add(layout)
        if 0 not in box.shape:
            by_tensor.setdefault(piece.tensor, []).append(piece)
    for tensor, pieces in sorted(by_tensor.items()):
        if len(pieces) == 1:
            continue
        together = tuple((p.box.start, p.box.shape, p.at) for p in pieces)
        if together in good.tensors:
            continue
        overlaps = list(_overlaps(pieces))
        for name, second in overlaps:
            yield problem(
                "BadManifest",
                f"{name!r} and {second!r} overlap in slab tensor {tensor!r} on {who}",
                worker.rank,
            )
        if not overlaps:
            good.tensors.add(together)


def _misplaced(piece: Piece, place: SlabTensor, expected: Expected) -> str:
    if not piece.box.inside(expected.shape):
        return f"piece {piece} is not inside shape {expected.shape}"
    if not _fits(piece, place.shape):
        return f"piece {piece} leaves its slab tensor {place.shape}"
    if place.dtype != expected.dtype:
        return f"slab {place.dtype}, expected {expected.dtype}"
    return ""


def _overlaps(pieces: Sequence[Piece]) -> Iterator[tuple[str, str]]:
    ordered = sorted(((p.region, p.name) for p in pieces), key=lambda r: (r[0].start, r[0].shape, r[1]))
    for i, (box, name) in enumerate(ordered):
        for other, second in ordered[i + 1 :]:
            if box.shape and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other) is not None or not box.shape:
                yield name, second


def _fits(piece: Piece, shape: tuple[int, ...]) -> bool:
    if not len(piece.box.shape) <= len(piece.at) == len(shape) or min(piece.at, default=0) < 0:
        return False
    return piece.region.inside(shape)


def _check_servers(sources: dict[str, SourceParameter], workers: Sequence[Worker]) -> Iterator[Problem]:
    """Each server, as a whole, must know each name that is sent and give it a place."""
    members: dict[str, list[Worker]] = {}
    for worker in workers:
        members.setdefault(worker.server, []).append(worker)
    done: set[tuple[int, ...]] = set()
    for server, group in members.items():
        key = tuple(sorted({id(w.manifest) for w in group}))
        if key in done:
            continue
        done.add(key)
        known: set[str] = set()
        placed: set[str] = set()
        unused: set[str] = set()
        for worker in group:
            manifest = worker.manifest
            known |= manifest.expected.keys() | manifest.aliases.keys() | manifest.unresolved.keys()
            unused |= manifest.unused
            placed |= {p.name for p in manifest.pieces if 0 not in p.box.shape}
            placed |= {a for a, n in manifest.aliases.items()} | manifest.unresolved.keys()
        drafts = any(name.startswith(DRAFT_PREFIX) for name in known)
        for name in sorted(sources):
            if name not in known and (name in unused or (name.startswith(DRAFT_PREFIX) and not drafts)):
                continue
            if name not in known:
                yield problem(
                    "UnknownParameter",
                    f"{name!r} is sent by the trainer, but server {server!r} (ranks {group[0].rank} to "
                    f"{group[-1].rank}) has no such parameter; name it as the server's checkpoint does, or do not "
                    "send it",
                    group[0].rank,
                )
            elif name not in placed and Box.whole(sources[name].shape).size:
                yield problem(
                    "Uncovered",
                    f"{name!r}: no rank of server {server!r} ({group[0].rank} to {group[-1].rank}) "
                    "has a place for it",
                    group[0].rank,
                )
