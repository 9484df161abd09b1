"""The reshard compiler: sources and destinations in, one plan out, the same on every rank.

Each move is in a module of its own: servers that are alike become groups (`groups`); the boxes of both sides are
laid over each other (`cuts`); where several ranks hold the same, their loads are made level (`senders`); parameters
that both sides cut evenly become stacks (`stacks`); what each sender has of the others for each unit of workers
becomes equal blocks (`patterns`), and those become steps here. Parameters that are laid out alike are worked out once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

from ..layout.boxes import Box
from ..layout.tensors import DTYPE_BYTES, Shard, SourceParameter
from .check import check, problem
from .cuts import Cut, Holders, Place, copies, overlay
from .groups import Group, Worker, group_workers
from .patterns import Pattern, decompose
from .plan import Part, Plan, Route, pieces_in_order
from .senders import spread
from .stacks import stacks
from .steps import Blocks, PlanError, Side, Stack, Step
from .targets import targets_of
from .validate import M2N, Envelope

_ALIGN = 256
"""Elements: blocks of one pattern that is split are multiples of this, the last one excepted."""


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
    by_name = check(sources, ordered, trainer_ranks)
    groups = group_workers(ordered)
    tied: dict[str, str] = {}
    routes = _routes([by_name[n] for n in sorted(by_name)], groups, by_name, tied, envelope)
    parts = _share_out(routes, groups, trainer_ranks)
    steps: list[Step] = list(stacks(routes, parts, groups, trainer_ranks, envelope))
    stacked = {at for step in steps if isinstance(step, Stack) for at in step.routes}
    steps += (
        step
        for group, dtype, width, lengths in _flows(routes, parts, stacked)
        for pattern in decompose(lengths, envelope.max_sources)
        for step in _steps(pattern, groups[group], group, dtype, width, envelope)
    )
    unused = by_name.keys() - tied.keys() - {route.source.name for route in routes}
    return Plan(
        trainer_ranks, trainer_ranks + len(ordered), groups, tuple(routes), parts, tuple(steps), tied,
        frozenset(name for name in unused if math.prod(by_name[name].shape)),
    )  # fmt: skip


# ---- who sends which elements to whom ----------------------------------------------------------------------


def _routes(
    sources: Sequence[SourceParameter],
    groups: Sequence[Group],
    sent: dict[str, SourceParameter],
    tied: dict[str, str],
    envelope: Envelope,
) -> list[Route]:
    """Per source and group of servers that it is written to. Notes names that need not travel in `tied`."""
    holders_of = Holders()
    places_of = [_pieces_by_name(group) for group in groups]
    cuts_of: dict[object, tuple[tuple[Cut, ...], int, tuple[tuple[Box, int], ...]]] = {}
    routes: list[Route] = []
    for source in sources:
        held = holders_of(source)
        for index, group in enumerate(groups):
            name = _filled(source.name, group, sent)
            if name is None:
                continue
            if name != source.name and name in sent:
                tied[source.name] = name
                continue
            places = places_of[index].get(name, ())
            if not held or not places:
                continue
            key = (id(held), group.width, places)
            found = cuts_of.get(key)
            if found is None:
                counts = copies(places, source.shape)
                if any(0 in c or len(c) > 1 for c in counts.values()):
                    raise _uncovered(source, set().union(*counts.values()), group)
                often = {box: next(iter(c)) for box, c in counts.items()}
                total = math.lcm(*often.values())
                weights = tuple((box, total // n) for box, n in sorted(often.items()) if n != total)
                widest = min(envelope.max_targets, group.width)
                cuts_of[key] = found = overlay(held, places, group.width, widest), total, weights
            routes.append(Route(source, name, index, *found))
    return routes


def _pieces_by_name(group: Group) -> dict[str, tuple[Place, ...]]:
    places: dict[str, list[Place]] = {}
    for position, manifest in enumerate(group.manifests):
        turns: dict[str, int] = defaultdict(int)
        for piece in pieces_in_order(manifest.pieces):
            places.setdefault(piece.name, []).append(Place(position, turns[piece.name], piece.box))
            turns[piece.name] += 1
    return {name: tuple(found) for name, found in places.items()}


def _filled(name: str, group: Group, sent: dict[str, SourceParameter]) -> str | None:
    """Under which name the group's workers place what is sent as `name`; another sent name where that one
    fills the storage already; None if no worker of the group has it."""
    for manifest in group.manifests:
        owner = manifest.aliases.get(name)
        if owner is None:
            continue
        if owner in sent:
            return owner
        # Two aliases of one storage, its own name not sent: the first of them fills it.
        first = min(a for a, n in manifest.aliases.items() if n == owner and a in sent)
        return owner if first == name else first
    return name


def _uncovered(source: SourceParameter, counts: set[int], group: Group) -> PlanError:
    what = "some elements have no place" if 0 in counts else f"elements have {sorted(counts)} copies"
    ranks = group.server_ranks(0)
    return PlanError(
        problem(
            "Uncovered",
            f"{source.name!r} of shape {source.shape}: {what} in server {group.servers[0]!r} (ranks "
            f"{ranks[0]} to {ranks[-1]}); its tensor parallel size must divide what it cuts",
            ranks[0],
        )
    )


def _share_out(routes: Sequence[Route], groups: Sequence[Group], trainer_ranks: int) -> dict[int, list[Part]]:
    """Which holder sends which elements of the cuts that several ranks hold, by the index of the route."""
    load = [0] * trainer_ranks
    shared: list[int] = []
    single: dict[tuple[int, int], tuple[tuple[Cut, ...], int]] = {}
    for at, route in enumerate(routes):
        key = route.group, id(route.cuts)
        if key not in single:
            single[key] = (() if any(len(cut.ranks) > 1 for cut in route.cuts) else route.cuts), 0
        cuts, total = single[key]
        if not cuts:
            shared.append(at)
        single[key] = cuts, total + DTYPE_BYTES[route.source.dtype]
    for (group, _), (cuts, total) in single.items():
        for cut in cuts:
            load[cut.ranks[0]] += cut.elements * total * cut.receivers * groups[group].replicas
    parts: dict[int, list[Part]] = {}
    for at in shared:
        route = routes[at]
        width = DTYPE_BYTES[route.source.dtype]
        parts[at] = [
            Part(number, sender, first, end)
            for number, cut in enumerate(route.cuts)
            for sender, first, end in spread(
                cut.elements, width, cut.ranks, load, cut.receivers * groups[route.group].replicas
            )
        ]
    return parts


def _flows(
    routes: Sequence[Route], parts: dict[int, list[Part]], stacked: Container[int]
) -> Iterator[tuple[int, str, int, dict[tuple[int, int], int]]]:
    """(group, dtype, workers of a unit, elements of each flow by sender and unit) of what is not stacked, in order."""
    alike: dict[tuple[int, str, int], int] = defaultdict(int)
    cuts: dict[int, tuple[Cut, ...]] = {}
    lengths: dict[tuple[int, str, int], dict[tuple[int, int], int]] = {}

    def add(group: int, dtype: str, cut: Cut, sender: int, elements: int) -> None:
        for width, unit in cut.units:
            flows = lengths.setdefault((group, dtype, width), {})
            flows[sender, unit] = flows.get((sender, unit), 0) + elements

    for at, route in enumerate(routes):
        if at in stacked:
            continue
        if at in parts:
            for part in parts[at]:
                add(route.group, route.source.dtype, route.cuts[part.cut], part.sender, part.end - part.first)
        else:
            alike[route.group, route.source.dtype, id(route.cuts)] += 1
            cuts[id(route.cuts)] = route.cuts
    for (group, dtype, which), times in alike.items():
        for cut in cuts[which]:
            add(group, dtype, cut, cut.ranks[0], cut.elements * times)
    for key in sorted(lengths):
        yield *key, lengths[key]


# ---- steps -------------------------------------------------------------------------------------------------


def _steps(
    pattern: Pattern, group: Group, index: int, dtype: str, width: int, envelope: Envelope
) -> Iterator[Step]:
    """A pattern for all servers of a group, cut to what one step may move."""
    source = Side(pattern.senders[0], (len(pattern.senders),), (Shard(0),))
    senders, units = len(pattern.senders), len(pattern.units)
    served = max(len({u for s, u in pattern.pairs if s == sender}) for sender in pattern.senders)
    if served * width > envelope.max_targets:
        yield from _narrower(pattern, group, index, dtype, width, envelope)
        return
    each = len(pattern.starts)
    share = max(each // senders, each // units) * DTYPE_BYTES[dtype]
    longest = max(envelope.max_local_bytes // share, 1)
    longest = max(longest // _ALIGN * _ALIGN, min(longest, _ALIGN))
    at_once = envelope.max_targets // (served * width)
    targets = list(
        targets_of(
            group.server_ranks(0)[0], group.replicas, group.width, pattern.units, width,
            1 if pattern.crossed else 0, at_once,
        )
    )  # fmt: skip
    for done in range(0, pattern.block, longest):
        block = min(longest, pattern.block - done)
        shape = (senders, units, block) if pattern.crossed else (each, block)
        starts = tuple(start + done for start in pattern.starts)
        for target in targets:  # one after the other: what is packed for one serves them all
            yield Blocks(index, dtype, shape, source, target, width, pattern.units[0], starts)


def _narrower(
    pattern: Pattern, group: Group, index: int, dtype: str, width: int, envelope: Envelope
) -> Iterator[Step]:
    """A pattern whose senders would serve too many workers, sender by sender in runs of units."""
    most = max(envelope.max_targets // width, 1)
    by_sender: dict[int, list[tuple[int, int]]] = {}
    for (sender, unit), start in zip(pattern.pairs, pattern.starts, strict=True):
        by_sender.setdefault(sender, []).append((unit, start))
    for sender, blocks in by_sender.items():
        for at in range(0, len(blocks), most):
            run = blocks[at : at + most]
            units = range(run[0][0], run[-1][0] + 1)
            starts = tuple(start for _, start in run)
            one = Pattern(range(sender, sender + 1), units, False, pattern.block, starts)
            yield from _steps(one, group, index, dtype, width, envelope)
