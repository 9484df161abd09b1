"""`Handle`: what becomes of one published version, and the errors that say so."""

from __future__ import annotations

import threading
import time
from enum import StrEnum

from ..protocol.messages import Problem
from ..protocol.mover import MoverOutcome


class PublishError(RuntimeError):
    """Raised on all trainer ranks at once, with the same words: what is wrong, on which rank, what to do."""


class PublishTimeout(PublishError, TimeoutError):
    """The version was not committed within the time that `wait` was given."""


class RoundFailed(PublishError):
    """The version is given up: it could not be brought to the servers. `problem` names the culprit."""

    def __init__(self, version: str, problem: Problem | None) -> None:
        said = f"{problem.reason}: {problem.message}" if problem else "no reason was given"
        super().__init__(f"version {version!r} was not committed. {said}")
        self.problem = problem


class Superseded(PublishError):
    """The version was never sent: another one was travelling, or took its place before any round began."""


class HandleState(StrEnum):
    PUBLISHED = "Published"
    """In the snapshot; no round carries it at the moment."""
    TRAVELLING = "Travelling"
    COMMITTED = "Committed"
    SUPERSEDED = "Superseded"
    FAILED = "Failed"


_FINAL = frozenset({HandleState.COMMITTED, HandleState.SUPERSEDED, HandleState.FAILED})


class Handle:
    """One published version on this rank. Safe to use from any thread."""

    def __init__(self, version: str) -> None:
        self.version = version
        self._state = HandleState.PUBLISHED
        self._why = ""
        self._problem: Problem | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Handle({self.version!r}, {self._state})"

    @property
    def state(self) -> HandleState:
        return self._state

    @property
    def problem(self) -> Problem | None:
        """Why the last round of this version failed; it may yet be tried again."""
        return self._problem

    def done(self) -> bool:
        return self._state in _FINAL

    def wait(self, timeout: float = 600.0) -> None:
        """Return once every server of the round serves the version.

        Raises `Superseded`, `RoundFailed` (given up, or the publisher was closed), or, after `timeout`
        seconds, `PublishTimeout`; each names the culprit as far as it is known.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._state not in _FINAL:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PublishTimeout(self._late(timeout))
                self._changed.wait(left)
        if self._state is HandleState.SUPERSEDED:
            raise Superseded(f"version {self.version!r} was never sent: {self._why}")
        if self._state is HandleState.FAILED:
            raise RoundFailed(self.version, self._problem)

    def _late(self, timeout: float) -> str:
        head = f"version {self.version!r} was not committed within {timeout:g} s"
        if self._problem is not None:
            return f"{head}. Its last round failed: {self._problem.reason}: {self._problem.message}"
        if self._state is HandleState.TRAVELLING:
            return f"{head}: a round is carrying it; see `kubectl describe weightsync`"
        return (
            f"{head}: no round took it up; see `kubectl describe weightsync`, and whether the operator runs"
        )

    def superseded(self, why: str) -> None:
        self._end(HandleState.SUPERSEDED, why)

    def closed(self) -> None:
        """The publisher lets go; a version that is still on its way is given up."""
        problem = Problem(reason="PublisherClosed", message="the publisher was closed before the commit")
        self._end(HandleState.FAILED, "", self._problem or problem)

    def outcome(self, outcome: MoverOutcome) -> None:
        """Take in what the pod's agent says."""
        if outcome.committed:
            self._end(HandleState.COMMITTED, "")
        elif outcome.final:
            self._end(HandleState.FAILED, "", outcome.problem)
        else:
            with self._changed:
                if self._state not in _FINAL:
                    self._state = HandleState.PUBLISHED if outcome.problem else HandleState.TRAVELLING
                    self._problem = outcome.problem or self._problem

    def _end(self, state: HandleState, why: str, problem: Problem | None = None) -> None:
        with self._changed:
            if self._state not in _FINAL:
                self._state, self._why, self._problem = state, why, problem
                self._changed.notify_all()
