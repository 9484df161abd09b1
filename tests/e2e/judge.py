"""What the witness heard, judged: pure.

An answer is right if its tokens are those of the version that its header names. Where a flip fell into the request,
as the server's next answer tells, they may be those of the next version, from the first token or from a later one on:
the header names the version at the request's beginning. Through the Service no answer is older than the version that
every server was known to have when the question was asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOADED = "loaded"
ROUTING_SECONDS = 3.0
"""How long a Service may still route to a pod that is not Ready any more: probes, endpoints and kube-proxy."""


@dataclass(frozen=True)
class Heard:
    """One answer. Times are seconds of the wall clock, which all pods of one machine share."""

    asked: float
    answered: float
    service: bool
    """Through the Service; else the pod's own address was asked."""
    pod: str
    version: str
    tokens: tuple[int, ...]


def number_of(version: str) -> int:
    """0 for the weights that vLLM loaded, 7 for `step-7`."""
    return 0 if version == LOADED else int(version.rsplit("-", 1)[1])


def wrong(
    heard: Sequence[Heard],
    book: Mapping[str, Sequence[int]],
    decided: set[str],
    finished: Sequence[tuple[float, str]],
) -> list[str]:
    """What must not have been said, in words.

    `book`: version -> its tokens. `decided`: versions with a recorded decision. `finished`: when each version was
    known to be live on all its members, ascending; times of the wall clock.
    """
    found = []
    ordered = sorted(heard, key=lambda h: h.asked)
    for one in ordered:
        where = f"{one.pod} at {one.asked:.1f} ({'Service' if one.service else 'direct'}) with {one.version}"
        tokens = book.get(one.version)
        if tokens is None:
            found.append(f"{where}: nobody published that")
            continue
        if one.version != LOADED and one.version not in decided:
            found.append(f"{where}: no decision on it was recorded")
        expected = tuple(tokens[: len(one.tokens)])
        after = book.get(_version_after(one, ordered), ())
        straddles = bool(after) and (
            one.tokens[0] == expected[0] or one.tokens == tuple(after[: len(one.tokens)])
        )
        if one.tokens != expected and not straddles:
            found.append(f"{where}: tokens {list(one.tokens)}, its weights give {list(expected)}")
        floor = max((number_of(v) for t, v in finished if t <= one.asked - ROUTING_SECONDS), default=0)
        if one.service and number_of(one.version) < floor:
            found.append(f"{where}: stale, step-{floor} was live everywhere")
    return found


def _version_after(one: Heard, ordered: Sequence[Heard]) -> str:
    """What the same server served when this answer was over, if that was later; else nothing."""
    following = (h for h in ordered if h.pod == one.pod and h.asked >= one.answered)
    after = next(following, one)
    return after.version if number_of(after.version) > number_of(one.version) else ""
