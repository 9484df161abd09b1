"""What every transport offers, and how failures are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..plan.plan import LocalPart, LocalStep
from ..protocol.messages import Problem

LocalTensor = Callable[[LocalPart], torch.Tensor]
"""Gives the region of this rank's slab that a part names, as a view of the part's own shape."""


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


class Transport(Protocol):
    """One communicator of one epoch. Not thread-safe; every rank calls `run` for the same steps in the same
    order."""

    def run(
        self, step: LocalStep, local: LocalTensor, stall_seconds: float, moved: Callable[[int], None]
    ) -> None:
        """Do this rank's share of one step; `moved` hears of bytes sent or received.

        Returns when the target regions are filled and the source regions may change. Raises `PeerFailure`
        that names the peer from which nothing came, or to which nothing went, for `stall_seconds`.
        """

    def close(self) -> None:
        """Drop all connections, at once and without the peers' help; their waits for this rank end.
        Idempotent."""
