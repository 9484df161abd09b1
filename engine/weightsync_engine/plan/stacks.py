"""Stacks: parameters that both sides cut evenly along one dimension each, as one reshard of all of them.

A reshard of contiguous tensors needs no packing where a rank's share is one run of its slab, as it is where the slab
holds the parameters of one kind one after the other. What is worth it is decided here, by layouts and sizes alone;
whether a share is one run is seen by the transport, rank by rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from ..layout.boxes import Box
from ..layout.kinds import kind_of
from ..layout.tensors import DTYPE_BYTES, Shard
from .groups import Group
from .plan import Route
from .steps import Side, Stack
from .targets import targets_of
from .validate import Envelope


@dataclass(frozen=True, slots=True)
class _Even:
    """How both sides cut the parameters of one layout."""

    senders: range
    sent: int | None
    """The dimension that the senders cut; None: one of them has it whole."""
    units: int
    width: int
    """Neighbouring workers that want the same."""
    turns: int
    """How often the units follow each other in a server."""
    wanted: int | None
    """The dimension that the units cut; None: every worker wants it whole."""
    served: int
    """The most workers of one server that one sender serves."""

    @property
    def axes(self) -> tuple[int, int]:
        """As of `Stack`: a side that cuts nothing may be said to cut what the other one does, into one."""
        first = next((axis for axis in (self.sent, self.wanted) if axis is not None), 0)
        sent, wanted = (first if axis is None else axis for axis in (self.sent, self.wanted))
        return sent, wanted


def stacks(
    routes: Sequence[Route],
    shared: Container[int],
    groups: Sequence[Group],
    trainer_ranks: int,
    envelope: Envelope,
) -> Iterator[Stack]:
    """All stacks of a plan, in order. `shared`: the routes of which several ranks hold the same elements.

    A route is in stacks wholly or not at all.
    """
    if not envelope.stack_bytes:
        return
    evens: dict[tuple[int, int], _Even | None] = {}
    alike: dict[tuple[int, str, str, int], list[tuple[tuple[int, ...], int]]] = {}
    for at, route in enumerate(routes):
        if at in shared:
            continue
        layout = route.group, id(route.cuts)
        if layout not in evens:
            evens[layout] = _even(route, groups[route.group], trainer_ranks, envelope)
        if evens[layout] is None:
            continue
        kind, numbers = kind_of(route.source.name)
        alike.setdefault((route.group, kind, route.source.dtype, id(route.cuts)), []).append((numbers, at))
    # Of one kind, those with the least route come first: ids of objects are not the same on all ranks.
    for (index, _, _, cuts), members in sorted(alike.items(), key=lambda item: (*item[0][:3], item[1])):
        even = evens[index, cuts]
        assert even is not None
        order = [at for _, at in sorted(members)]
        yield from _stack(order, routes[order[0]], even, groups[index], envelope)


def _even(route: Route, group: Group, trainer_ranks: int, envelope: Envelope) -> _Even | None:
    """How a route's parameter is cut, where a stack can say it."""
    shape = route.source.shape
    held: dict[int, Box] = {}
    wanted: dict[int, Box] = {}
    heard: dict[Box, int] = {}
    served: dict[int, int] = {}
    for cut in route.cuts:
        if cut.turn or len(cut.ranks) > 1 or not shape:
            return None
        rank = cut.ranks[0]
        held[rank] = _around(held[rank], cut.box) if rank in held else cut.box
        heard[cut.wanted] = heard.get(cut.wanted, 0) + 1
        served[rank] = served.get(rank, 0) + cut.receivers
        for width, unit in cut.units:
            wanted |= dict.fromkeys(range(unit * width, (unit + 1) * width), cut.wanted)
    senders = range(min(held), max(held) + 1)
    if len(senders) != len(held) or sorted(wanted) != list(range(group.width)):
        return None
    if len(senders) < min(trainer_ranks, group.width):
        return None  # flows keep more ranks busy at once
    if max(heard.values()) > envelope.max_sources or max(served.values()) > envelope.max_targets:
        return None
    places = [wanted[position] for position in range(group.width)]
    units = list(dict.fromkeys(places))
    often, rest = divmod(group.width, len(units))
    if not rest and places == [box for box in units for _ in range(often)]:
        width, turns = often, 1
    elif not rest and places == units * often:
        width, turns = 1, often
    else:
        return None
    cuts = [_axis(boxes, shape) for boxes in ([held[rank] for rank in senders], units)]
    if -1 in cuts:
        return None
    sent, taken = (axis if len(of) > 1 else None for axis, of in zip(cuts, (senders, units), strict=True))
    return _Even(senders, sent, len(units), width, turns, taken, max(served.values()))


def _around(one: Box, other: Box) -> Box:
    """The box around two that are parts of one box."""
    start = tuple(map(min, one.start, other.start))
    stop = map(max, one.stop, other.stop)
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def _axis(boxes: Sequence[Box], shape: tuple[int, ...]) -> int:
    """The dimension that boxes cut into equal parts, in their order, or -1."""
    axis = next(
        (d for d, (part, whole) in enumerate(zip(boxes[0].shape, shape, strict=True)) if part < whole), 0
    )
    part = (*shape[:axis], shape[axis] // len(boxes), *shape[axis + 1 :])
    for number, box in enumerate(boxes):
        start = (*(0 for _ in shape[:axis]), number * part[axis], *(0 for _ in shape[axis + 1 :]))
        if (box.start, box.shape) != (start, part):
            return -1
    return axis if part[axis] * len(boxes) == shape[axis] else -1


def _stack(
    order: Sequence[int], first: Route, even: _Even, group: Group, envelope: Envelope
) -> Iterator[Stack]:
    """What is alike, in stacks whose shares are no larger than allowed; nothing where that is not worth it."""
    shape, dtype = first.source.shape, first.source.dtype
    one = math.prod(shape) // min(len(even.senders), even.units) * DTYPE_BYTES[dtype]
    if len(order) * one < envelope.stack_bytes:
        return
    at_once = envelope.max_local_bytes // one
    parts = _parts(even, shape, one, envelope) if at_once == 0 else 1
    if parts == 0:
        return
    count = -(-len(order) // max(at_once, 1))
    low, high = min(even.axes), max(even.axes)
    source = Side(even.senders[0], (len(even.senders),), (Shard(_step_axis(even.sent, low)),))
    targets = list(
        targets_of(
            group.first_rank, group.replicas * even.turns, group.width // even.turns, range(even.units),
            even.width, _step_axis(even.wanted, low), envelope.max_targets * even.turns // even.served,
        )
    )  # fmt: skip
    for n, part in itertools.product(range(count), range(parts)):
        routes = tuple(order[len(order) * n // count : len(order) * (n + 1) // count])
        lead = len(routes) * math.prod(shape[:low])
        rest = math.prod(shape[low + 1 :]) if low == high else math.prod(shape[high:])
        middle = shape[low] // parts if low == high else math.prod(shape[low:high])
        tensor = (lead, middle, rest) if high + 1 < len(shape) or low < high else (lead, middle)
        for target in targets:
            yield Stack(first.group, dtype, tensor, source, target, routes, shape, even.axes, part, parts)


def _step_axis(axis: int | None, low: int) -> int:
    """Which dimension of a stack's tensor a side cuts that cuts `axis` of its parameters."""
    return 0 if axis is None else 1 if axis == low else 2


def _parts(even: _Even, shape: tuple[int, ...], one: int, envelope: Envelope) -> int:
    """Into how many parts to take a parameter whose share of `one` bytes is too large; 0 where it cannot be said."""
    axis, other = even.axes
    if axis != other or math.prod(shape[:axis]) > 1:
        return 0  # a part would be no run of memory on the side that cuts a later dimension
    rows = shape[axis] // math.lcm(len(even.senders), even.units)
    least = -(-one // envelope.max_local_bytes)
    return next((parts for parts in range(least, min(2 * least, rows) + 1) if rows % parts == 0), 0)
