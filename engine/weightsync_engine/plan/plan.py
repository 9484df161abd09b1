"""A plan: what all ranks agree on, and what one rank has to do of it."""

from __future__ import annotations

import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..layout.boxes import Box
from ..layout.shards import shard_boxes
from ..layout.tensors import DTYPE_BYTES, Piece, Shard, SourceParameter, WorkerManifest
from ..protocol.messages import ROUNDED_SHOWN, PlanSummary, rounded_words
from .cuts import Cut
from .groups import Group
from .steps import Blocks, FlowKey, Side, Stack, Step


@dataclass(frozen=True, slots=True)
class Route:
    """How one parameter reaches one group of servers."""

    source: SourceParameter
    name: str
    """Of the workers' pieces: the source's own, or that of which it is an alias."""
    group: int
    cuts: tuple[Cut, ...]
    copies: int
    """How often each element counts in what a server's digests add up to: as often as it lives there, if that is the
    same for all of them."""
    weights: tuple[tuple[Box, int], ...] = ()
    """Else how often what a piece's box holds is counted, so that it is the same for all: q lives once and k twice in
    a `qkv_proj` of fewer KV heads than workers."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `[first, end)` of a route's cut, in row-major order of its box, and who sends them."""

    cut: int
    sender: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Region `box` of slab tensor `tensor`, in row-major order of that region."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class LocalBlock:
    """One block of a rank's share of a step: what it is packed from or unpacked to, and who has the other
    end. A share of a stack is one block."""

    peers: tuple[int, ...]
    """The one sender, or all receivers. Of a stack: all who have any of it."""
    parts: tuple[LocalPart, ...]
    """In order; together they have the block's elements."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What one rank does in a step."""

    index: int
    """In the plan's steps."""
    step: Step
    sends: bool
    blocks: tuple[LocalBlock, ...]
    """The rank's share of the step's tensor, row-major."""

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks at the other end, ascending."""
        return tuple(sorted({p for block in self.blocks for p in block.peers}))

    @property
    def elements(self) -> int:
        """Of the rank's share."""
        return self.step.share(self.sends) if self.blocks else 0

    @property
    def local_bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.step.dtype]


@dataclass(frozen=True)
class Plan:
    """What every rank does in a round. Equal plans have equal digests, whatever order their inputs came
    in."""

    trainer_ranks: int
    world_size: int
    groups: tuple[Group, ...]
    routes: tuple[Route, ...]
    parts: dict[int, list[Part]]
    """By the index of the route, where not each cut is sent whole by the one rank that holds it."""
    steps: tuple[Step, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """Parameters that are not sent because another one, which is, fills the same storage: they must be
    equal."""
    unused: frozenset[str] = frozenset()
    """Parameters that are not sent because no server makes use of them."""

    def parts_of(self, route: int) -> Iterator[Part]:
        if route in self.parts:
            yield from self.parts[route]
        else:
            for number, cut in enumerate(self.routes[route].cuts):
                yield Part(number, cut.ranks[0], 0, cut.elements)

    @cached_property
    def digest(self) -> str:
        """blake2b over the canonical form, hex."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._canonical():
            digest.update(json.dumps(part, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()

    def _canonical(self) -> Iterator[object]:
        def side(s: Side) -> object:
            return [
                s.first_rank,
                s.mesh,
                [f"S{p.dim}" if isinstance(p, Shard) else "R" for p in s.placements],
            ]

        yield ["weightsync plan 3", self.trainer_ranks, self.world_size]
        yield [[g.first_rank, g.width, g.servers] for g in self.groups]
        known: dict[int, int] = {}
        for at, route in enumerate(self.routes):
            number = known.setdefault(id(route.cuts), len(known))
            if number == len(known) - 1:
                yield [[c.box.start, c.box.shape, c.ranks, c.turn, c.units] for c in route.cuts]
            yield [route.source.name, route.source.dtype, route.name, route.group, number, route.copies]
            if route.weights:
                yield [[box.start, box.shape, weight] for box, weight in route.weights]
            if at in self.parts:
                yield [[p.cut, p.sender, p.first, p.end] for p in self.parts[at]]
        for s in self.steps:
            yield [type(s).__name__, s.group, s.dtype, s.shape, side(s.source), side(s.target)]
            if isinstance(s, Stack):
                yield [s.routes, s.parameter, s.axes, s.part, s.parts]
            elif isinstance(s, Blocks):
                yield [s.width, s.first_unit, s.starts]
        yield sorted(self.tied.items())
        yield sorted(self.unused)

    @cached_property
    def stacked(self) -> frozenset[int]:
        """The routes that travel in stacks; the others are parts of flows."""
        return frozenset(at for step in self.steps if isinstance(step, Stack) for at in step.routes)

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters that travel."""
        return frozenset(route.source.name for route in self.routes)

    @cached_property
    def fallback(self) -> dict[str, str]:
        """Parameters that some worker takes whole and gives to vLLM's own loader, each with the reason."""
        reasons: dict[str, str] = {}
        for route in self.routes:
            for manifest in self.groups[route.group].manifests:
                if route.name in manifest.fallback:
                    reasons.setdefault(route.source.name, manifest.fallback[route.name])
        return dict(sorted(reasons.items()))

    @cached_property
    def rounded(self) -> dict[str, tuple[str, str]]:
        """Parameters that lose bits on their way which the trainer means to keep: (its dtype, the wire's)."""
        sources = {route.source.name: route.source for route in self.routes}
        return {n: (s.rounded_from, s.dtype) for n, s in sorted(sources.items()) if s.rounded_from}

    @cached_property
    def draft(self) -> frozenset[str]:
        """Parameters that travel for nothing but draft models."""
        names: set[str] = set()
        others: set[str] = set()
        alone = [_for_drafts(group) for group in self.groups]
        for route in self.routes if any(alone) else ():
            (names if route.name in alone[route.group] else others).add(route.source.name)
        return frozenset(names - others)

    @cached_property
    def bytes_received(self) -> int:
        """By all workers together."""
        return sum(step.bytes_sent for step in self.steps)

    @cached_property
    def summary(self) -> PlanSummary:
        parameters = len(self.names | self.tied.keys())
        return PlanSummary(
            digest=self.digest,
            parameters=parameters,
            direct=parameters - len(self.fallback),
            fallback=len(self.fallback),
            unused=len(self.unused),
            draft=len(self.draft),
            rounded=len(self.rounded),
            bytes_total=self.bytes_received,
            steps=len(self.steps),
            reasons=tuple(f"{name}: {why}"[:512] for name, why in itertools.islice(self.fallback.items(), 1)),
            first_rounded=tuple(
                rounded_words(name, *dtypes)[:512]
                for name, dtypes in itertools.islice(self.rounded.items(), ROUNDED_SHOWN)
            ),
        )

    # -- one rank ------------------------------------------------------------------------------------------

    def weights(self, rank: int) -> dict[str, dict[Box, int]]:
        """Of a worker's own names: what its pieces count in digests, where that is not once."""
        return {
            route.name: dict(route.weights)
            for route in self.routes
            if route.weights and rank in self.groups[route.group].ranks
        }

    def local(self, rank: int, collective: bool = False) -> tuple[LocalStep, ...]:
        """What `rank` does, in order: all that it needs to keep of a plan. `collective`: with the steps in which
        it moves nothing, for transports that need every rank in every step."""
        sends = rank < self.trainer_ranks
        held: _Sent | _Received = _Sent(rank) if sends else _Received(rank, self.groups)
        flows = self._sent_flows(held) if isinstance(held, _Sent) else self._received_flows(held)
        readers = {key: _Flow(stretches) for key, stretches in flows.items()}
        result: list[LocalStep] = []
        for index, step in enumerate(self.steps):
            side = step.source if sends else step.target
            if rank not in side.ranks:
                if collective:
                    result.append(LocalStep(index, step, sends, ()))
                continue
            blocks: list[LocalBlock] = []
            if isinstance(step, Stack):
                place = rank - side.first_rank
                boxes = step.boxes(sends, place)
                parts = (held.part(self.routes[at], box) for at in step.routes for box in boxes)
                blocks.append(LocalBlock(step.peers(sends, place), tuple(parts)))
            elif isinstance(step, Blocks):
                for number in step.sent_blocks(rank) if sends else step.received_blocks(rank):
                    key, start = step.flow(number), step.starts[number]
                    peers = step.receivers(number) if sends else (key.sender,)
                    blocks.append(LocalBlock(peers, tuple(readers[key].read(start, start + step.block))))
            result.append(LocalStep(index, step, sends, tuple(blocks)))
        return tuple(result)

    def _sent_flows(self, held: _Sent) -> dict[FlowKey, list[_Stretch]]:
        flows: dict[FlowKey, list[_Stretch]] = {}
        senders: dict[int, bool] = {}
        for at, route in enumerate(self.routes):
            if at in self.stacked:
                continue
            if at not in self.parts:
                known = id(route.cuts)
                if known not in senders:
                    senders[known] = any(cut.ranks[0] == held.rank for cut in route.cuts)
                if not senders[known]:
                    continue
            for part in self.parts_of(at):
                if part.sender != held.rank:
                    continue
                cut = route.cuts[part.cut]
                stretch = _Stretch(held.part(route, cut.box), part.first, part.end)
                for width, unit in cut.units:
                    key = FlowKey(route.group, route.source.dtype, width, held.rank, unit)
                    flows.setdefault(key, []).append(stretch)
        return flows

    def _received_flows(self, held: _Received) -> dict[FlowKey, list[_Stretch]]:
        flows: dict[FlowKey, list[_Stretch]] = {}
        for at, route in enumerate(self.routes):
            if at in self.stacked or route.group != held.group or (route.name, 0) not in held.pieces:
                continue
            for part in self.parts_of(at):
                cut = route.cuts[part.cut]
                unit = next((u for u in cut.units if u[1] * u[0] <= held.position < (u[1] + 1) * u[0]), None)
                if unit is None:
                    continue
                key = FlowKey(held.group, route.source.dtype, unit[0], part.sender, unit[1])
                stretch = _Stretch(held.part(route, cut.box, cut.turn), part.first, part.end)
                flows.setdefault(key, []).append(stretch)
        return flows


class _Sent:
    """Where a trainer rank holds what."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._shards: dict[object, Box | None] = {}

    def part(self, route: Route, box: Box) -> LocalPart:
        """Elements `box` of the route's parameter."""
        source = route.source
        layout = (id(source.mesh), source.placements, source.tensor_shape)
        if layout not in self._shards:
            self._shards[layout] = shard_boxes(source)[self.rank]
        shard = self._shards[layout]
        assert shard is not None
        region, drop = source.region, len(source.tensor_shape) - len(source.shape)
        start = (
            *region.start[:drop],
            *(a + b for a, b in zip(region.start[drop:], box.start, strict=True)),
        )
        return LocalPart(source.tensor, Box(start, (1,) * drop + box.shape).relative_to(shard.start))


class _Received:
    """Where a worker holds what."""

    def __init__(self, rank: int, groups: Sequence[Group]) -> None:
        self.group, group = next((i, g) for i, g in enumerate(groups) if rank in g.ranks)
        self.position = (rank - group.first_rank) % group.width
        self.pieces = _pieces_by_turn(group.manifests[self.position])

    def part(self, route: Route, box: Box, turn: int = 0) -> LocalPart:
        """Elements `box` of the route's parameter, where it is held for the `turn`-th time."""
        piece = self.pieces[route.name, turn]
        drop = len(piece.at) - len(box.shape)
        start = (a + b - c for a, b, c in zip(piece.at[drop:], box.start, piece.box.start, strict=True))
        return LocalPart(piece.tensor, Box((*piece.at[:drop], *start), (1,) * drop + box.shape))


def _for_drafts(group: Group) -> frozenset[str]:
    """What no worker of a server needs but for its draft model."""
    wanted = frozenset[str]().union(*(m.draft for m in group.manifests))
    if not wanted:
        return wanted
    return wanted.difference(*(m.expected.keys() - m.draft for m in group.manifests))


def pieces_in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Those that hold anything, in the order in which several of one name are counted."""
    return sorted((p for p in pieces if p.box.size), key=lambda p: (p.name, p.tensor, p.box, p.at))


def _pieces_by_turn(manifest: WorkerManifest) -> dict[tuple[str, int], Piece]:
    found: dict[tuple[str, int], Piece] = {}
    turns: dict[str, int] = {}
    for piece in pieces_in_order(manifest.pieces):
        turn = turns.get(piece.name, 0)
        found[piece.name, turn] = piece
        turns[piece.name] = turn + 1
    return found


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Elements `[first, end)` of a part, in row-major order."""

    part: LocalPart
    first: int
    end: int


class _Flow:
    """A flow as one rank holds it, read by ranges of its elements."""

    def __init__(self, stretches: list[_Stretch]) -> None:
        self._stretches = stretches
        self._ends: list[int] = []
        end = 0
        for stretch in stretches:
            end += stretch.end - stretch.first
            self._ends.append(end)

    def read(self, start: int, stop: int) -> Iterator[LocalPart]:
        """The parts that elements `[start, stop)` of the flow are, in order."""
        at = bisect_right(self._ends, start)
        while start < stop:
            stretch = self._stretches[at]
            begin = self._ends[at] - (stretch.end - stretch.first)
            end = min(stop, self._ends[at])
            first = stretch.first + start - begin
            for box in rows(stretch.part.box, first, first + end - start):
                yield LocalPart(stretch.part.tensor, box)
            start, at = end, at + 1


def rows(box: Box, first: int, end: int) -> Iterator[Box]:
    """Elements `[first, end)` of a box in row-major order, as few boxes as they take, in order."""
    if first >= end:
        return
    if first == 0 and end == box.size:
        yield box
        return
    axis = next(d for d, n in enumerate(box.shape) if n > 1)
    inner = box.size // box.shape[axis]

    def slab(begin: int, extent: int) -> Box:
        start = tuple(s + (begin if d == axis else 0) for d, s in enumerate(box.start))
        return Box(start, (*box.shape[:axis], extent, *box.shape[axis + 1 :]))

    row, within = divmod(first, inner)
    if within:
        stop = min(inner, within + end - first)
        yield from rows(slab(row, 1), within, stop)
        first += stop - within
        row += 1
    whole = (end - first) // inner
    if whole > 0:
        yield slab(row, whole)
        first += whole * inner
    if first < end:
        yield from rows(slab(row + max(whole, 0), 1), 0, end - first)
