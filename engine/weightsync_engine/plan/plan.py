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
from .steps import FlowKey, Side, Step


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
    end."""

    peers: tuple[int, ...]
    """The one sender, or all receivers."""
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
        return len(self.blocks) * self.step.block

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

        yield ["weightsync plan 2", self.trainer_ranks, self.world_size]
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
            yield [
                s.group, s.dtype, s.shape, side(s.source), side(s.target), s.width, s.first_unit, s.starts
            ]  # fmt: skip
        yield sorted(self.tied.items())
        yield sorted(self.unused)

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
        side = [s.source if sends else s.target for s in self.steps]
        flows = self._sent_flows(rank) if sends else self._received_flows(rank)
        readers = {key: _Flow(parts) for key, parts in flows.items()}
        result: list[LocalStep] = []
        for index, step in enumerate(self.steps):
            if rank not in side[index].ranks:
                if collective:
                    result.append(LocalStep(index, step, sends, ()))
                continue
            blocks: list[LocalBlock] = []
            for number in step.sent_blocks(rank) if sends else step.received_blocks(rank):
                key, start = step.flow(number), step.starts[number]
                peers = step.receivers(number) if sends else (key.sender,)
                blocks.append(LocalBlock(peers, tuple(readers[key].read(start, start + step.block))))
            result.append(LocalStep(index, step, sends, tuple(blocks)))
        return tuple(result)

    def _sent_flows(self, rank: int) -> dict[FlowKey, list[_Stretch]]:
        flows: dict[FlowKey, list[_Stretch]] = {}
        boxes: dict[object, Box | None] = {}
        senders: dict[int, bool] = {}
        for at, route in enumerate(self.routes):
            if at not in self.parts:
                known = id(route.cuts)
                if known not in senders:
                    senders[known] = any(cut.ranks[0] == rank for cut in route.cuts)
                if not senders[known]:
                    continue
            source = route.source
            for part in self.parts_of(at):
                if part.sender != rank:
                    continue
                layout = (id(source.mesh), source.placements, source.tensor_shape)
                if layout not in boxes:
                    boxes[layout] = shard_boxes(source)[rank]
                held = boxes[layout]
                assert held is not None
                cut = route.cuts[part.cut]
                region, drop = source.region, len(source.tensor_shape) - len(source.shape)
                box = Box(
                    (
                        *region.start[:drop],
                        *(a + b for a, b in zip(region.start[drop:], cut.box.start, strict=True)),
                    ),
                    (1,) * drop + cut.box.shape,
                ).relative_to(held.start)
                for width, unit in cut.units:
                    key = FlowKey(route.group, source.dtype, width, rank, unit)
                    flows.setdefault(key, []).append(_Stretch(source.tensor, box, part.first, part.end))
        return flows

    def _received_flows(self, rank: int) -> dict[FlowKey, list[_Stretch]]:
        index, group = next((i, g) for i, g in enumerate(self.groups) if rank in g.ranks)
        position = (rank - group.first_rank) % group.width
        pieces = _pieces_by_turn(group.manifests[position])
        flows: dict[FlowKey, list[_Stretch]] = {}
        for at, route in enumerate(self.routes):
            if route.group != index or (route.name, 0) not in pieces:
                continue
            for part in self.parts_of(at):
                cut = route.cuts[part.cut]
                unit = next((u for u in cut.units if u[1] * u[0] <= position < (u[1] + 1) * u[0]), None)
                if unit is None:
                    continue
                piece = pieces[route.name, cut.turn]
                drop = len(piece.at) - len(cut.box.shape)
                start = tuple(
                    a + b - c for a, b, c in zip(piece.at[drop:], cut.box.start, piece.box.start, strict=True)
                )
                box = Box((*piece.at[:drop], *start), (1,) * drop + cut.box.shape)
                key = FlowKey(index, route.source.dtype, unit[0], part.sender, unit[1])
                flows.setdefault(key, []).append(_Stretch(piece.tensor, box, part.first, part.end))
        return flows


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
    """Elements `[first, end)` of a region of a slab tensor, in row-major order."""

    tensor: str
    box: Box
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
            for box in rows(stretch.box, first, first + end - start):
                yield LocalPart(stretch.tensor, box)
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
