"""The reshard compiler: sources and destinations in, one plan out, the same on every rank.

What one even step expresses becomes one step, over all servers at once where their layouts are alike.
Everything else that boxes can express (uneven chunks, empty tails, scattered copies) becomes blocks: what
one trainer rank holds of what one worker wants, sent from a single rank, repeated to neighbours that want
the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..layout.boxes import Box
from ..layout.shards import LayoutError, shard_boxes
from ..layout.tensors import DTYPE_BYTES, Piece, Replicate, Shard, SourceParameter, WorkerManifest
from ..protocol.messages import Problem
from .steps import Copies, LocalPart, Plan, PlanError, Side, Step
from .validate import M2N, Envelope, violations


@dataclass(frozen=True, slots=True)
class Worker:
    """One vLLM worker of the epoch. Workers of one `server` together hold whole copies of the model."""

    rank: int
    server: str
    manifest: WorkerManifest


@dataclass(frozen=True, slots=True)
class _Held:
    """One distinct box of a source and the trainer ranks that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One place that a parameter lands in: a worker and a piece of it."""

    rank: int
    server: str
    piece: Piece
    shape: tuple[int, ...]
    """Of the slab tensor that the piece lies in."""

    def part(self, box: Box) -> LocalPart:
        """Where elements `box` of the parameter (inside the piece) lie in the slab tensor."""
        region = box.relative_to(self.piece.box.start).shifted(self.piece.at)
        return LocalPart(self.piece.tensor, region, not contiguous(region, self.shape))


def compile_plan(
    sources: Sequence[SourceParameter],
    workers: Sequence[Worker],
    trainer_ranks: int,
    envelope: Envelope = M2N,
) -> Plan:
    """Plan how `sources` (equal on all `trainer_ranks` ranks) reach the pieces of `workers`.

    Independent of the order of its inputs. Raises `PlanError`, whose problem names the parameter, both
    values that do not fit, and the rank, for: no parameters or no workers, ranks that are not `[T, T + N)`,
    meshes outside `[0, T)`, names that one side lacks, shapes or dtypes that differ, what a worker could not
    resolve, pieces that overlap, leave the slab, or do not cover a parameter the same number of times.
    """
    ordered = sorted(workers, key=lambda w: w.rank)
    by_name = _check(sources, ordered, trainer_ranks)
    steps: list[Step] = []
    copies: dict[str, tuple[Copies, ...]] = {}
    tied: dict[str, str] = {}
    index = _pieces_by_name(ordered)
    for turn, name in enumerate(sorted(by_name)):
        source = by_name[name]
        wanted = _destinations(source, ordered, by_name, index, tied)
        if not wanted:
            continue
        copies[name] = _copies(source, wanted, ordered)
        steps += _Compiler(source, turn, wanted, envelope).steps()
    return Plan(trainer_ranks, trainer_ranks + len(ordered), tuple(steps), copies, tied)


def contiguous(region: Box, shape: tuple[int, ...]) -> bool:
    """Whether the region of a row-major tensor of that shape is one run of memory."""
    inner = itertools.dropwhile(lambda d: region.shape[d] == 1, range(len(shape)))
    return all(region.shape[d] == shape[d] for d in list(inner)[1:])


def holders(source: SourceParameter) -> list[_Held]:
    """The distinct boxes of a source in order, each with the ranks that hold it."""
    ranks: dict[Box, list[int]] = {}
    for rank, box in shard_boxes(source).items():
        if box is not None:
            ranks.setdefault(box, []).append(rank)
    return [_Held(box, tuple(sorted(ranks[box]))) for box in sorted(ranks)]


# ---- one parameter -----------------------------------------------------------------------------------------


class _Compiler:
    def __init__(self, source: SourceParameter, turn: int, wanted: list[_Wanted], envelope: Envelope) -> None:
        self.source = source
        self.turn = turn
        """Counts parameters: whose turn it is among the holders of replicated sources."""
        self.wanted = wanted
        self.envelope = envelope
        self.held = holders(source)
        self.whole = Box.whole(source.shape)

    def steps(self) -> Iterator[Step]:
        for layer in _layers(self.wanted):
            step = self._even(layer)
            if step is not None:
                yield step
                continue
            for _, group in itertools.groupby(layer, key=lambda w: w.server):
                ranks = list(group)
                step = self._even(ranks)
                if step is not None:
                    yield step
                else:
                    yield from self._blocks(ranks)

    def _even(self, wanted: list[_Wanted]) -> Step | None:
        """One step that moves the whole parameter to these workers, or None if M2N has no words for it."""
        senders = [h.ranks[self.turn % len(h.ranks)] for h in self.held]
        source = _match(senders, [h.box for h in self.held], self.whole)
        target = _match([w.rank for w in wanted], [w.piece.box for w in wanted], self.whole)
        if source is None or target is None:
            return None
        axes = [p.dim for p in (*source[1], *target[1]) if isinstance(p, Shard)]
        shape, moved = _join(self.source.shape, axes)
        parts = [LocalPart(self.source.name, Box.whole(h.box.shape), False) for h in self.held]
        step = Step(
            self.source.name,
            self.whole,
            shape,
            self.source.dtype,
            _side(senders[0], source, moved, parts),
            _side(wanted[0].rank, target, moved, [w.part(w.piece.box) for w in wanted]),
        )
        return None if violations(step, self.envelope) else step

    def _blocks(self, wanted: list[_Wanted]) -> Iterator[Step]:
        """Steps from single ranks, each to a run of neighbours that want the same elements."""
        for held in self.held:
            sender = held.ranks[self.turn % len(held.ranks)]
            for box in sorted({w.piece.box for w in wanted}):
                common = held.box.intersect(box)
                if common is None:
                    continue
                for run in _runs([w for w in wanted if w.piece.box == box], self.envelope.max_targets):
                    for block in _split(
                        common, DTYPE_BYTES[self.source.dtype], self.envelope.max_local_bytes
                    ):
                        yield self._block(block, held, sender, run)

    def _block(self, block: Box, held: _Held, sender: int, run: list[_Wanted]) -> Step:
        region = block.relative_to(held.box.start)
        part = LocalPart(self.source.name, region, not contiguous(region, held.box.shape))
        target = ((len(run), 1), (Replicate(), Shard(0))) if len(run) > 1 else ((1,), (Shard(0),))
        return Step(
            self.source.name,
            block,
            (block.size,),
            self.source.dtype,
            Side(sender, (1,), (Shard(0),), (part,)),
            Side(run[0].rank, target[0], target[1], tuple(w.part(block) for w in run)),
        )


_Mesh = tuple[tuple[int, ...], tuple[Replicate | Shard, ...]]


def _match(ranks: Sequence[int], boxes: Sequence[Box], whole: Box) -> _Mesh | None:
    """Mesh and placements under which these ranks hold these boxes of `whole`, if M2N can say it."""
    n = len(ranks)
    if n == 0 or list(ranks) != list(range(ranks[0], ranks[0] + n)):
        return None
    distinct = sorted(set(boxes))
    d = len(distinct)
    if d == 1:
        if boxes[0] != whole:
            return None
        # Replicated is spelled with a cut over one rank: a mesh without any shard axis is not supported.
        return ((n, 1), (Replicate(), Shard(0))) if n > 1 else ((1,), (Shard(0),))
    axes = [a for a in range(len(whole.shape)) if distinct[0].shape[a] != whole.shape[a]]
    if len(axes) != 1 or n % d:
        return None
    axis = axes[0]
    size, rest = divmod(whole.shape[axis], d)
    shape = (*whole.shape[:axis], size, *whole.shape[axis + 1 :])
    if rest or any(
        b.shape != shape or b.start != tuple(i * size if a == axis else 0 for a in range(len(shape)))
        for i, b in enumerate(distinct)
    ):
        return None
    order = [distinct.index(b) for b in boxes]
    copies = n // d
    if copies == 1 and order == list(range(n)):
        return (n,), (Shard(axis),)
    if order == [i // copies for i in range(n)]:
        return (d, copies), (Shard(axis), Replicate())
    if order == [i % d for i in range(n)]:
        return (copies, d), (Replicate(), Shard(axis))
    return None


def _join(shape: tuple[int, ...], axes: list[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """The shape in 1 to 3 dimensions, and where each cut axis went: an axis that is cut starts a joined
    one."""
    if 1 <= len(shape) <= 3:
        return shape, {a: a for a in axes}
    starts = sorted({0, *axes})
    joined = tuple(math.prod(shape[a:b]) for a, b in zip(starts, [*starts[1:], len(shape)], strict=True))
    return joined, {a: starts.index(a) for a in axes}


def _side(first: int, found: _Mesh, moved: dict[int, int], parts: Iterable[LocalPart]) -> Side:
    mesh, placements = found
    return Side(
        first,
        mesh,
        tuple(Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in placements),
        tuple(parts),
    )


def _layers(wanted: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Workers that hold a parameter twice (two storages) take it twice: the first of each, the second of
    each."""
    by_rank = {rank: list(group) for rank, group in itertools.groupby(wanted, key=lambda w: w.rank)}
    for places in itertools.zip_longest(*by_rank.values()):
        yield [w for w in places if w is not None]


def _runs(wanted: list[_Wanted], longest: int) -> Iterator[list[_Wanted]]:
    """Maximal runs of neighbouring ranks, none longer than `longest`."""
    run: list[_Wanted] = []
    for w in wanted:
        if run and (w.rank != run[-1].rank + 1 or len(run) == longest):
            yield run
            run = []
        run.append(w)
    if run:
        yield run


def _split(box: Box, width: int, limit: int) -> Iterator[Box]:
    """The box in parts of at most `limit` bytes, cut along the first dimensions."""
    if box.size * width <= limit or box.size == 1:
        yield box
        return
    axis = next(d for d, n in enumerate(box.shape) if n > 1)
    half = box.shape[axis] // 2
    for start, extent in ((0, half), (half, box.shape[axis] - half)):
        at = tuple(s + (start if d == axis else 0) for d, s in enumerate(box.start))
        yield from _split(
            Box(at, (*box.shape[:axis], extent, *box.shape[axis + 1 :])),
            width,
            limit,
        )


# ---- destinations and checks -------------------------------------------------------------------------------

_Index = dict[int, dict[str, list[Piece]]]


def _pieces_by_name(workers: Sequence[Worker]) -> _Index:
    """Per manifest (servers share them) its pieces by checkpoint name, in order."""
    index: _Index = {}
    for worker in workers:
        if id(worker.manifest) not in index:
            pieces: dict[str, list[Piece]] = {}
            for piece in sorted(worker.manifest.pieces, key=lambda p: (p.name, p.tensor, p.box, p.at)):
                if piece.box.size:
                    pieces.setdefault(piece.name, []).append(piece)
            index[id(worker.manifest)] = pieces
    return index


def _destinations(
    source: SourceParameter,
    workers: Sequence[Worker],
    sent: dict[str, SourceParameter],
    index: _Index,
    tied: dict[str, str],
) -> list[_Wanted]:
    """All pieces that this source fills. A name whose storage another sent name fills is noted in `tied`."""
    wanted: list[_Wanted] = []
    for worker in workers:
        name = worker.manifest.aliases.get(source.name, source.name)
        if name != source.name:
            if name in sent:
                tied[source.name] = name
                continue
            # Two aliases of one storage, its own name not sent: the first of them fills it.
            first = min(a for a, n in worker.manifest.aliases.items() if n == name and a in sent)
            if first != source.name:
                tied[source.name] = first
                continue
        for piece in index[id(worker.manifest)].get(name, ()):
            wanted.append(
                _Wanted(worker.rank, worker.server, piece, worker.manifest.tensors[piece.tensor].shape)
            )
    return wanted


def _copies(source: SourceParameter, wanted: list[_Wanted], workers: Sequence[Worker]) -> tuple[Copies, ...]:
    """How often each server holds the parameter. Raises `PlanError` where that is not one number above 0."""
    result: list[Copies] = []
    ranks: dict[str, list[int]] = {}
    boxes: dict[str, list[Box]] = {}
    for worker in workers:
        ranks.setdefault(worker.server, []).append(worker.rank)
    for w in wanted:
        boxes.setdefault(w.server, []).append(w.piece.box)
    for server, members in ranks.items():
        if server not in boxes:
            continue  # another sent name fills the storage there
        counts = _counts(boxes[server], source.shape)
        if len(counts) != 1 or 0 in counts:
            what = "some elements have no place" if 0 in counts else f"elements have {sorted(counts)} copies"
            raise PlanError(
                _problem(
                    "Uncovered",
                    f"{source.name!r} of shape {source.shape}: {what} in server {server!r} "
                    f"(ranks {members[0]} to {members[-1]}); its tensor parallel size must divide "
                    f"what it cuts",
                    members[0],
                )
            )
        result.append(Copies(server, tuple(members), counts.pop()))
    return tuple(result)


def _counts(boxes: Sequence[Box], shape: tuple[int, ...]) -> set[int]:
    """By how many boxes the elements of a tensor are covered: all numbers that occur."""
    whole = Box.whole(shape)
    if all(b == whole for b in boxes):
        return {len(boxes)}
    cuts = [
        sorted({0, n, *(b.start[d] for b in boxes), *(b.stop[d] for b in boxes)}) for d, n in enumerate(shape)
    ]
    cells = itertools.product(*(list(itertools.pairwise(c)) for c in cuts))
    counts: set[int] = set()
    for cell in cells:
        box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        counts.add(sum(b.contains(box) for b in boxes))
    return counts


def _problem(reason: str, message: str, rank: int | None = None) -> Problem:
    return Problem(reason=reason, message=message[:1024], rank=rank)


def _check(
    sources: Sequence[SourceParameter], workers: Sequence[Worker], trainer_ranks: int
) -> dict[str, SourceParameter]:
    """Everything that can be wrong before layouts are matched. Returns the sources by name."""
    problems = list(itertools.chain(_check_world(sources, workers, trainer_ranks)))
    by_name = {s.name: s for s in sources}
    if not problems:
        checked: set[int] = set()
        for worker in workers:
            if id(worker.manifest) not in checked:  # of servers that are alike, the first is named
                checked.add(id(worker.manifest))
                problems += _check_worker(worker, by_name)
        problems += _check_servers(by_name, workers)
    if problems:
        first = problems[0]
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise PlanError(_problem(first.reason, first.message[: 1024 - len(more)] + more, first.rank))
    return by_name


def _check_world(
    sources: Sequence[SourceParameter], workers: Sequence[Worker], trainer_ranks: int
) -> Iterator[Problem]:
    if not sources:
        yield _problem("NoParameters", "the trainer sends no parameters at all", 0)
    ranks = [w.rank for w in workers]
    if not ranks or ranks != list(range(trainer_ranks, trainer_ranks + len(ranks))):
        yield _problem("WorldSize", f"workers have ranks {ranks}, not those after {trainer_ranks} trainers")
    seen: set[str] = set()
    for source in sorted(sources, key=lambda s: s.name):
        if source.name in seen:
            yield _problem("BadSource", f"the trainer gives {source.name!r} twice", 0)
        seen.add(source.name)
        if source.dtype not in DTYPE_BYTES:
            yield _problem("BadSource", f"{source.name!r}: dtype {source.dtype!r} cannot travel", 0)
        try:
            shard_boxes(source)
        except LayoutError as e:
            yield _problem("BadSource", str(e), 0)
        outside = [r for r in source.mesh.ranks if r >= trainer_ranks]
        if outside:
            yield _problem(
                "WorldSize",
                f"{source.name!r} lives on trainer ranks up to {max(outside)}, but the epoch "
                f"has {trainer_ranks} trainer ranks: all ranks of the trainer must be members",
                0,
            )


def _check_worker(worker: Worker, sources: dict[str, SourceParameter]) -> Iterator[Problem]:
    manifest, who = worker.manifest, f"rank {worker.rank} (server {worker.server!r})"
    for name, reason in sorted(manifest.unresolved.items()):
        yield _problem("Unresolved", f"{name!r} cannot be written on {who}: {reason}", worker.rank)
    filled_by_alias = {n for a, n in manifest.aliases.items() if a in sources}
    for name, expected in sorted(manifest.expected.items()):
        source = sources.get(name)
        if source is None:
            if name not in manifest.aliases and name not in filled_by_alias:
                yield _problem(
                    "NotSent", f"{name!r} is expected by {who}, but the trainer does not send it", worker.rank
                )
            continue
        yield from _check_match(source, name, expected.shape, expected.dtype, who, worker.rank)
    for alias, name in sorted(manifest.aliases.items()):
        source, want = sources.get(alias), manifest.expected.get(name)
        if source is not None and want is not None and alias not in manifest.expected:
            yield from _check_match(source, alias, want.shape, want.dtype, who, worker.rank)
    yield from _check_pieces(worker, who)


def _check_match(
    source: SourceParameter, name: str, shape: tuple[int, ...], dtype: str, who: str, rank: int
) -> Iterator[Problem]:
    if source.shape != shape:
        yield _problem(
            "ShapeDiffers", f"{name!r}: the trainer sends shape {source.shape}, {who} has {shape}", rank
        )
    elif source.dtype != dtype:
        yield _problem(
            "DtypeDiffers",
            f"{name!r}: the trainer sends {source.dtype}, {who} has {dtype}; set the wire dtype to {dtype}",
            rank,
        )


def _check_pieces(worker: Worker, who: str) -> Iterator[Problem]:
    manifest = worker.manifest
    regions: dict[str, list[tuple[Box, str]]] = {}
    for piece in sorted(manifest.pieces, key=lambda p: (p.name, p.tensor, p.box, p.at)):
        place, expected = manifest.tensors.get(piece.tensor), manifest.expected.get(piece.name)
        where = f"{piece.name!r} on {who}"
        if place is None or expected is None:
            lacking = f"slab tensor {piece.tensor!r}" if place is None else "an expected shape"
            yield _problem("BadManifest", f"{where}: its piece has no {lacking}", worker.rank)
        elif not _inside(piece.box, expected.shape):
            yield _problem(
                "BadManifest", f"{where}: piece {piece} is not inside shape {expected.shape}", worker.rank
            )
        elif not _inside_at(piece, place.shape):
            yield _problem(
                "BadManifest", f"{where}: piece {piece} leaves its slab tensor {place.shape}", worker.rank
            )
        elif place.dtype != expected.dtype:
            yield _problem(
                "BadManifest", f"{where}: slab {place.dtype}, expected {expected.dtype}", worker.rank
            )
        elif piece.box.size:
            regions.setdefault(piece.tensor, []).append((Box(piece.at, piece.box.shape), piece.name))
    for tensor in sorted(regions):
        ordered = sorted(regions[tensor])
        for i, (box, name) in enumerate(ordered):
            for other, second in ordered[i + 1 :]:
                if box.shape and other.start[0] >= box.stop[0]:
                    break
                if box.intersect(other) is not None or not box.shape:
                    yield _problem(
                        "BadManifest",
                        f"{name!r} and {second!r} overlap in slab tensor {tensor!r} on {who}",
                        worker.rank,
                    )


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.shape) == len(shape) and Box.whole(shape).contains(box)


def _inside_at(piece: Piece, shape: tuple[int, ...]) -> bool:
    if len(piece.at) != len(piece.box.shape) or min(piece.at, default=0) < 0:
        return False
    return _inside(Box(piece.at, piece.box.shape), shape)


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
        for worker in group:
            manifest = worker.manifest
            known |= manifest.expected.keys() | manifest.aliases.keys() | manifest.unresolved.keys()
            placed |= {p.name for p in manifest.pieces if p.box.size}
            placed |= {a for a, n in manifest.aliases.items()} | manifest.unresolved.keys()
        for name in sorted(sources):
            if name not in known:
                yield _problem(
                    "UnknownParameter",
                    f"{name!r} is sent by the trainer, but server {server!r} (ranks {group[0].rank} to "
                    f"{group[-1].rank}) has no such parameter",
                    group[0].rank,
                )
            elif name not in placed and Box.whole(sources[name].shape).size:
                yield _problem(
                    "Uncovered",
                    f"{name!r}: no rank of server {server!r} ({group[0].rank} to {group[-1].rank}) "
                    "has a place for it",
                    group[0].rank,
                )
