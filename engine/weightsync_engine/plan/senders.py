"""Which of the ranks that hold the same elements sends them: so that no rank sends much more than others."""

from __future__ import annotations

from collections.abc import Sequence

SPLIT_BYTES = 64 << 10
"""Less than this for each holder is not worth splitting: one of them sends it all."""


def spread(
    elements: int, width: int, ranks: Sequence[int], load: list[int], receivers: int = 1
) -> list[tuple[int, int, int]]:
    """Share out `elements` of `width` bytes each, wanted by `receivers`, among the ranks that hold them all.

    `load`, bytes that each rank sends already, is raised by what each one gets. Those that send least get
    most, so that loads become level. Returns `(rank, first element, end)`, in order of elements.
    """
    width *= receivers
    if len(ranks) == 1 or elements * width < SPLIT_BYTES * len(ranks):
        chosen = min(ranks, key=lambda r: (load[r], r))
        load[chosen] += elements * width
        return [(chosen, 0, elements)]
    ordered = sorted(ranks, key=lambda r: (load[r], r))
    left = elements * width
    filled = 0
    level = 0
    for filled in range(1, len(ordered) + 1):
        # The first `filled` ranks can be raised to the load of the next one.
        upto = load[ordered[filled]] if filled < len(ordered) else None
        room = None if upto is None else sum(upto - load[r] for r in ordered[:filled])
        if room is None or room >= left:
            level = (left + sum(load[r] for r in ordered[:filled])) // filled
            break
    shares = {r: max(level - load[r], 0) // width for r in ordered[:filled]}
    rest = elements - sum(shares.values())
    for rank in ordered[:filled]:
        more = min(rest, 1 + rest // filled)
        shares[rank] += more
        rest -= more
    parts: list[tuple[int, int, int]] = []
    at = 0
    for rank in sorted(shares):
        if shares[rank]:
            parts.append((rank, at, at + shares[rank]))
            at += shares[rank]
            load[rank] += shares[rank] * width
    return parts
