"""What every transport offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..plan.plan import LocalPart, LocalStep
from ..plan.validate import Envelope
from .store import EpochStore

LocalTensor = Callable[[LocalPart], torch.Tensor]
"""Gives the region of this rank's slab that a part names, as a view of the part's own shape."""


class Transport(ABC):
    """One communicator of one epoch. Not thread-safe; every rank begins the same steps in the same order, and
    finishes them in that order."""

    envelope: ClassVar[Envelope]
    """What steps may be, for this transport: part of the plan that all ranks agree on."""
    collective: ClassVar[bool]
    """Whether ranks that move nothing in a step must begin it as well."""
    depth: ClassVar[int]
    """How many steps may have begun before the first of them must be finished."""
    check_bytes: ClassVar[int]
    """About so many bytes of the largest share lie between two looks for peers: looking costs round trips."""

    @abstractmethod
    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        """Connect to all peers, met through the epoch's store, by `deadline` (monotonic seconds).

        Raises `Failure` if this pod cannot, `PeerFailure` naming a rank that is late.
        """

    @staticmethod
    def configure(envelope: Envelope) -> None:
        """Before anything else, once in a process: give the library the settings that steps of `envelope` need. Raises
        `Failure` if the environment says something that does not fit."""
        return

    @staticmethod
    @abstractmethod
    def runtime() -> dict[str, Any]:
        """What must be equal on all ranks: versions and settings of the libraries. Raises `Failure` if this pod
        lacks one, with what to install."""

    @abstractmethod
    def begin(self, step: LocalStep, local: LocalTensor) -> None:
        """Start this rank's share of a step. Source regions must stay as they are until it is finished.

        Raises `PeerFailure` if the communicator is of no use any more.
        """

    @abstractmethod
    def finish(self, stall_seconds: float, moved: Callable[[int], None]) -> None:
        """End the oldest step that has begun; `moved` hears of bytes sent or received.

        Returns when the target regions are filled and the source regions may change. Raises `PeerFailure`
        that names the peer from which nothing came, or to which nothing went, for `stall_seconds`.
        """

    @property
    def hopeless(self) -> bool:
        """Whether something is stuck that only the end of this process ends. `close` does not wait for it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Drop all connections, at once and without the peers' help; their waits for this rank end.
        Idempotent."""
