"""Before a step the peers agree, through the store, that each of them is there.

Each rank writes down which of its own steps it has entered and which comes next. A peer's word is looked at
one step ahead: whoever has entered its step before this one counts as present, so that in the ordinary case
the word is there already and nobody waits. A peer that is frozen or dead is thus nearly always found before
its partners are inside an exchange with it, and named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from .failure import PeerFailure
from .store import EpochStore, poll_pauses

_END = 1 << 60
TELL_SECONDS = 0.05
"""Whoever waits longer than this tells the others for whom."""
SETTLE_SECONDS = 0.5
"""How long ranks that have given up on a peer let the others say for whom they wait."""


class Presence:
    """The positions of this rank and its peers in one round. `own` are the steps this rank takes part in and before
    which peers look for each other; all that take part in a step must look, or none."""

    def __init__(self, store: EpochStore, scope: str, own: Sequence[int]) -> None:
        self._store = store
        self._scope = scope
        self._own = list(own)
        self._known: dict[int, int] = {}
        self._say(-1, self._own[0] if self._own else _END)

    def _key(self, rank: int) -> str:
        return f"at/{self._scope}/{rank}"

    def _say(self, entered: int, coming: int, waits_for: int | None = None, inside: bool = False) -> None:
        value = {"entered": entered, "next": coming, "waits_for": waits_for, "inside": inside}
        self._store.put(self._key(self._store.rank), json.dumps(value).encode())

    def enter(self, turn: int, peers: Sequence[int], seconds: float) -> None:
        """Wait until all `peers` are about to enter this rank's step number `turn`, then enter it.

        Raises `PeerFailure` PeerLate after `seconds`, naming the rank that everybody waits for in the end.
        """
        step = self._own[turn]
        deadline = time.monotonic() + seconds
        before = self._own[turn - 1] if turn else -1
        told = False
        started, pauses = time.monotonic(), poll_pauses()
        while True:
            asked = {self._key(p): p for p in peers if self._known.get(p, -2) < step}
            if asked:
                first = {k: p for k, p in asked.items() if p not in self._known}
                values = self._first_words(first, deadline, before, step)
                values |= self._store.read_all({k: p for k, p in asked.items() if k not in first})
                for key, peer in asked.items():
                    self._known[peer] = int(json.loads(values[key])["next"])
            missing = [p for p in peers if self._known[p] < step]
            if not missing:
                break
            self._store.raise_failed()
            if time.monotonic() >= deadline:
                self._late(step, missing[0], seconds)
            if not told and time.monotonic() - started > TELL_SECONDS:
                self._say(before, step, missing[0])
                told = True
            time.sleep(next(pauses))
        self._say(step, self._own[turn + 1] if turn + 1 < len(self._own) else _END)

    def _first_words(
        self, first: dict[str, int], deadline: float, before: int, step: int
    ) -> dict[str, bytes]:
        """What peers say that have said nothing yet in this round. Whoever waits for one of them lets the others know:
        they may give up on this rank sooner than it does on that one."""
        what = "its position in the round"
        if not first:
            return {}
        try:
            return self._store.get_all(first, min(deadline, time.monotonic() + TELL_SECONDS), what)
        except PeerFailure:
            absent = [rank for key, rank in first.items() if not self._store.exists(key)]
            if absent:
                self._say(before, step, absent[0])
        return self._store.get_all(first, deadline, what)

    def _late(self, step: int, rank: int, seconds: float) -> None:
        culprit = self._culprit(rank)
        position = self._position(culprit)
        # A rank at the end of a chain of waits stands still in a step of its own.
        stands = min(step, int(position["next"])) if position is not None else step
        raise PeerFailure(
            "PeerLate",
            f"{self._store.named(culprit)} has not started {self._store.step(stands)} for {seconds:.1f} s: its "
            "mover is frozen, starved or cut off; it is replaced when its pod's agent kills it",
            culprit,
        )

    def judge(self, step: int, failure: PeerFailure) -> PeerFailure:
        """Who is to blame for a failed exchange in a step of the plan: perhaps not the peer it names.

        The peer may itself have waited in vain for a third rank, and may be closing its connections for that.
        So all ranks that wait say for whom, and after a moment each follows the chain to its end.
        """
        peer = failure.problem.rank
        if failure.problem.reason not in ("PeerLate", "PeerLost") or peer is None:
            return failure
        self._say(step, step + 1, peer, inside=True)
        # Those whose connection broke wait longer: the rank that broke it has more to tell, if it lives.
        until = time.monotonic() + (
            SETTLE_SECONDS if failure.problem.reason == "PeerLate" else 3 * SETTLE_SECONDS
        )
        while time.monotonic() < until:
            self._store.raise_failed()
            time.sleep(0.02)
        culprit = self._culprit(peer)
        if culprit == peer:
            return failure
        message = f"{failure.problem.message}; rank {peer} itself waited for {self._store.named(culprit)}"
        return PeerFailure(failure.problem.reason, message, culprit)

    def _culprit(self, rank: int) -> int:
        """Follow who waits for whom, so that the rank to blame is named and not one that waits like us."""
        seen = {self._store.rank}
        while rank not in seen:
            seen.add(rank)
            value = self._position(rank)
            if value is None or value["waits_for"] in (None, self._store.rank):
                break
            other = int(value["waits_for"])
            theirs = self._position(other)
            if not value["inside"] and theirs is not None and theirs["next"] >= value["next"]:
                break  # what it waited for has come: it stands still by itself
            rank = other
        return rank

    def _position(self, rank: int) -> dict[str, Any] | None:
        key = self._key(rank)
        if rank not in self._known and not self._store.exists(key):
            return None
        result: dict[str, Any] = json.loads(self._store.read_all({key: rank})[key])
        return result
