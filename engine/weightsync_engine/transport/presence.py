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

from .base import PeerFailure
from .store import EpochStore

_END = 1 << 60


class Presence:
    """The positions of this rank and its peers in one round. `own` are the steps this rank takes part in."""

    def __init__(self, store: EpochStore, scope: str, own: Sequence[int]) -> None:
        self._store = store
        self._scope = scope
        self._own = list(own)
        self._known: dict[int, int] = {}
        self._say(-1, self._own[0] if self._own else _END)

    def _key(self, rank: int) -> str:
        return f"at/{self._scope}/{rank}"

    def _say(self, entered: int, coming: int, waits_for: int | None = None) -> None:
        value = {"entered": entered, "next": coming, "waits_for": waits_for}
        self._store.put(self._key(self._store.rank), json.dumps(value).encode())

    def enter(self, turn: int, peers: Sequence[int], seconds: float) -> None:
        """Wait until all `peers` are about to enter this rank's step number `turn`, then enter it.

        Raises `PeerFailure` PeerLate after `seconds`, naming the rank that everybody waits for in the end.
        """
        step = self._own[turn]
        deadline = time.monotonic() + seconds
        before = self._own[turn - 1] if turn else -1
        told = False
        pause = 0.0005
        while True:
            asked = {self._key(p): p for p in peers if self._known.get(p, -2) < step}
            if asked:
                values = self._store.get_all(asked, deadline, "its position in the round")
                for key, peer in asked.items():
                    self._known[peer] = int(json.loads(values[key])["next"])
            missing = [p for p in peers if self._known[p] < step]
            if not missing:
                break
            self._store.raise_failed()
            if time.monotonic() >= deadline:
                self._late(step, missing[0], seconds)
            if not told and pause > 0.01:
                self._say(before, step, missing[0])
                told = True
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        self._say(step, self._own[turn + 1] if turn + 1 < len(self._own) else _END)

    def _late(self, step: int, rank: int, seconds: float) -> None:
        """Follow who waits for whom, so that the rank to blame is named and not one that waits like us."""
        seen = {self._store.rank}
        while rank not in seen:
            seen.add(rank)
            key = self._key(rank)
            value = json.loads(
                self._store.get(key, rank, time.monotonic() + 1.0, "its position in the round")
            )
            other = value["waits_for"]
            if other is None:
                break
            theirs = json.loads(
                self._store.get(self._key(other), other, time.monotonic() + 1.0, "its position in the round")
            )
            if theirs["next"] >= value["next"]:
                break  # what it waited for has come: it stands still by itself
            rank = int(other)
        raise PeerFailure(
            "PeerLate",
            f"rank {rank} did not come to step {step} within {seconds:.1f} s: its mover is frozen, "
            f"starved or cut off; "
            "it is replaced when its pod's agent kills it",
            rank,
        )
