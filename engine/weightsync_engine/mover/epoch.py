"""One rank's membership of one epoch: join (store, manifests, plan, communicator), then transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..layout.tensors import TrainerManifest, WorkerManifest
from ..protocol.messages import PlanSummary, Problem
from ..protocol.mover import MoverJoin, MoverTransfer
from .slab import Slab


class Failure(Exception):
    """A join or a transfer that failed, with the words for the person who has to mend it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class Epoch:
    def __init__(self, request: MoverJoin, manifest: TrainerManifest | WorkerManifest, slab: Slab) -> None:
        self.request = request
        self.usable = True
        self.progress: dict[str, Any] = {}
        self._cancel = threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def cancel(self) -> None:
        self._cancel.set()

    def join(self) -> PlanSummary:
        raise Failure(Problem(reason="NotBuilt", message="the transport is not built yet"))

    def transfer(self, request: MoverTransfer, progress: Callable[..., None]) -> None:
        raise Failure(Problem(reason="NotBuilt", message="the transport is not built yet"))

    def close(self) -> None:
        pass
