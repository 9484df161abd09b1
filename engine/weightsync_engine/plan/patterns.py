"""From how much each sender has for each unit of workers, to few equal-block patterns that M2N can express.

Two patterns are enough. *Crossed*: every sender of a run has one block for every unit of a run. *Stepped*: the
blocks in order belong to senders in equal shares and to units in equal shares, as when both sides cut the same
dimension. What neither covers is left for the next pass, and in the end goes from single senders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Pair = tuple[int, int]
"""(sender's rank, unit's index)."""

_PASSES = 6
_WORTHWHILE = 8
"""A pattern that moves less than one part in so many of what is there is put off for a better one."""


@dataclass(frozen=True, slots=True)
class Pattern:
    senders: range
    units: range
    crossed: bool
    block: int
    """Elements of one block."""
    starts: tuple[int, ...]
    """Of each block, in order: which element of its pair's flow it begins with."""

    @property
    def pairs(self) -> list[Pair]:
        """Of each block, in order."""
        return _pairs(self.senders, self.units, self.crossed)


def decompose(lengths: Mapping[Pair, int], max_senders: int) -> list[Pattern]:
    """Patterns that together move `lengths[pair]` elements for every pair, each exactly once.

    No unit hears more than `max_senders` senders in one pattern.
    """
    left = {pair: n for pair, n in sorted(lengths.items()) if n}
    taken = dict.fromkeys(left, 0)
    patterns: list[Pattern] = []

    def take(senders: range, units: range, crossed: bool, block: int) -> None:
        starts: list[int] = []
        for pair in _pairs(senders, units, crossed):
            starts.append(taken[pair])
            taken[pair] += block
            left[pair] -= block
            if left[pair] == 0:
                del left[pair]
        patterns.append(Pattern(senders, units, crossed, block, tuple(starts)))

    for _ in range(_PASSES):
        for senders, units in _everything(left):
            found = _fit(senders, units, left, max_senders)
            if found:
                for one in found:
                    take(*one)
                continue
            connected = _connected(left, senders, units)
            for run in _staircases(connected):
                whole = range(run[0][0][0], run[-1][0][-1] + 1), range(run[0][1][0], run[-1][1][-1] + 1)
                found = _fit(*whole, left, max_senders) if len(run) > 1 else []
                for rows, columns in [] if found else run:
                    found += _fit(rows, columns, left, max_senders) or list(_by_sender(rows, columns, left))
                for one in found:
                    take(*one)
        if not left:
            return patterns
    for sender, pairs in itertools.groupby(sorted(left), key=lambda p: p[0]):
        for _, unit in list(pairs):
            take(range(sender, sender + 1), range(unit, unit + 1), False, left[sender, unit])
    return patterns


def _fit(
    senders: range, units: range, left: Mapping[Pair, int], max_senders: int
) -> list[tuple[range, range, bool, int]]:
    """Patterns that together move a good part of what a rectangle has left; none if there are no such."""
    crossed = [
        (chunk, units, len(chunk) > 1 < len(units), min(left.get((s, u), 0) for s in chunk for u in units))
        for chunk in _chunks(senders, max_senders)
    ]
    stepped = list(_stepped(senders, units, left, max_senders))
    total = sum(left.get((s, u), 0) for s in senders for u in units)
    if all(block for *_, block in crossed):
        # First, however little: what a stepped pattern leaves of it would be in pieces.
        return crossed
    moved = sum(_blocks(s, u, c) * block for s, u, c, block in stepped)
    return stepped if all(p[3] for p in stepped) and moved * _WORTHWHILE >= total else []


def _by_sender(
    senders: range, units: range, left: Mapping[Pair, int]
) -> Iterator[tuple[range, range, bool, int]]:
    """For each sender, what it has for all units of a run of neighbours."""
    for sender in senders:
        for run in _runs(u for u in units if (sender, u) in left):
            yield range(sender, sender + 1), run, False, min(left[sender, u] for u in run)


def _stepped(
    senders: range, units: range, left: Mapping[Pair, int], max_senders: int
) -> Iterator[tuple[range, range, bool, int]]:
    blocks: dict[Pair, int] = {}
    for pair in _pairs(senders, units, False):
        blocks[pair] = blocks.get(pair, 0) + 1
    heard = max(len({s for s, u in blocks if u == unit}) for unit in units)
    if heard <= max_senders:
        yield senders, units, False, min(left.get(pair, 0) // n for pair, n in blocks.items())
        return
    for unit in units:
        for chunk in _chunks(range(*_bounds(s for s, u in blocks if u == unit)), max_senders):
            one = range(unit, unit + 1)
            yield chunk, one, False, min(left.get((s, unit), 0) for s in chunk)


def _pairs(senders: range, units: range, crossed: bool) -> list[Pair]:
    if crossed:
        return [(s, u) for s in senders for u in units]
    n = math.lcm(len(senders), len(units))
    return [(senders[i * len(senders) // n], units[i * len(units) // n]) for i in range(n)]


def _blocks(senders: range, units: range, crossed: bool) -> int:
    return len(senders) * len(units) if crossed else math.lcm(len(senders), len(units))


def _everything(left: Iterable[Pair]) -> list[tuple[range, range]]:
    """Runs of senders, each with the runs of units that it has something for."""
    pairs = list(left)
    return [
        (senders, units)
        for senders in _runs(sorted({s for s, _ in pairs}))
        for units in _runs(sorted({u for s, u in pairs if s in senders}))
    ]


def _connected(left: Iterable[Pair], within: range, among: range) -> list[tuple[range, range]]:
    """The same for those of a rectangle that are connected by something left."""
    units_of: dict[int, list[int]] = {}
    senders_of: dict[int, list[int]] = {}
    for sender, unit in left:
        if sender in within and unit in among:
            units_of.setdefault(sender, []).append(unit)
            senders_of.setdefault(unit, []).append(sender)
    found: list[tuple[range, range]] = []
    seen: set[int] = set()
    for first in sorted(units_of):
        if first in seen:
            continue
        pairs, todo = set[Pair](), [first]
        while todo:
            sender = todo.pop()
            if sender in seen:
                continue
            seen.add(sender)
            for unit in units_of[sender]:
                pairs.add((sender, unit))
                todo += senders_of[unit]
        found += _everything(pairs)
    return found


def _staircases(rectangles: list[tuple[range, range]]) -> list[list[tuple[range, range]]]:
    """Rectangles of one size, of which each begins, both ways, where the one before it ends."""
    runs: list[list[tuple[range, range]]] = []
    for rows, columns in sorted(rectangles, key=lambda r: (r[0][0], r[1][0])):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last[0].stop, last[1].stop) == (rows.start, columns.start)
            and (len(last[0]), len(last[1])) == (len(rows), len(columns))
        ):
            runs[-1].append((rows, columns))
        else:
            runs.append([(rows, columns)])
    return runs


def _runs(values: Iterable[int]) -> Iterator[range]:
    """Maximal runs of neighbours of ascending values."""
    for _, group in itertools.groupby(enumerate(values), key=lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        yield range(run[0], run[-1] + 1)


def _bounds(values: Iterable[int]) -> Sequence[int]:
    found = list(values)
    return min(found), max(found) + 1


def _chunks(run: range, longest: int) -> list[range]:
    """The run in nearly equal parts, none longer than `longest`."""
    parts = -(-len(run) // longest)
    return [run[len(run) * i // parts : len(run) * (i + 1) // parts] for i in range(parts)]
