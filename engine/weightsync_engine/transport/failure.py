"""How failures of a join or a transfer are told."""

from __future__ import annotations

from ..protocol.messages import Problem


class Failure(Exception):
    """A join or a transfer that failed, in the words for the person who has to mend it."""

    def __init__(self, reason: str, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(reason=reason, message=message[:1024], rank=rank)

    @classmethod
    def of(cls, problem: Problem) -> Failure:
        return cls(problem.reason, problem.message, problem.rank)


class PeerFailure(Failure):
    """A peer is late or lost: the communicator is of no use any more."""


class Agreed(Failure):
    """A verdict that every rank has read: nothing needs to be told, and the communicator is as good as
    before."""
