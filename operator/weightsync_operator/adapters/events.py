"""Which events to write when: the first of a cause at once, those that follow within a minute together, as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.rounds import EventNote

PAUSE_SECONDS = 60.0


@dataclass(frozen=True)
class Due:
    """An event to write now."""

    note: EventNote
    """The newest of its cause."""
    count: int
    """How many there were since the last that was written."""


@dataclass
class _Cause:
    written: float
    note: EventNote
    waiting: int = 0


class Repeats:
    """One object's events. `now` is in seconds of any monotonic clock."""

    def __init__(self, pause: float = PAUSE_SECONDS) -> None:
        self._pause = pause
        self._causes: dict[tuple[object, ...], _Cause] = {}

    def due(self, notes: Iterable[EventNote], now: float) -> list[Due]:
        """Takes in what has happened; what is to be written of it, and of what waited until now."""
        for note in notes:
            key: tuple[object, ...] = (note.type, note.reason, note.cause)
            cause = self._causes.setdefault(key, _Cause(float("-inf"), note))
            cause.note, cause.waiting = note, cause.waiting + 1
        result = []
        for key, cause in list(self._causes.items()):
            if now - cause.written < self._pause:
                continue
            if cause.waiting:
                result.append(Due(cause.note, cause.waiting))
                cause.written, cause.waiting = now, 0
            else:
                del self._causes[key]
        return result

    def wait(self, now: float) -> float:
        """Seconds until something that waits is due; infinite if nothing does."""
        times = [cause.written + self._pause - now for cause in self._causes.values() if cause.waiting]
        return max(0.0, min(times, default=float("inf")))
