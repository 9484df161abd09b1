"""A worker's shadow, and the flip: the one moment at which new weights become the live ones."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from ..mover.slab import Slab
from ..protocol.messages import Problem, Published
from ..resolve.loader import LoaderError
from ..resolve.manifest import Resolved
from ..transport.copies import Copies, same_bits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flipped:
    """Which flip made the live weights what they are."""

    object_uid: str
    epoch: int
    round: int
    version: str


class Shadow:
    """The slab beside the live weights. Its mover writes it; `flip` copies it over, in the worker's own
    thread, and gives to vLLM's loader what cannot be copied.

    What is live is a fact kept here, in the process that holds the weights: an agent that restarts asks for
    it.
    """

    def __init__(self, resolved: Resolved, slab: Slab) -> None:
        self.slab = slab
        self.live: Flipped | None = None
        """None: the weights that vLLM loaded at its start."""
        self.torn = False
        """A copy began and did not end: the live weights are of no one version."""
        self.seconds = 0.0
        """Duration of the last flip's copies, vLLM's loader included."""
        self.loader_seconds = 0.0
        """The loader's share of it."""
        held = {name: slab.tensor(place) for name, place in resolved.manifest.tensors.items()}
        with torch.inference_mode():
            # What no piece fills (the padding of a vocabulary) stays as it is live.
            for name, live in resolved.views.items():
                held[name].copy_(live)
        copies = list(resolved.copies(held))
        self._names = [name for name, _, _ in copies]
        self._live = [live for _, live, _ in copies]
        self._next = [new for _, _, new in copies]
        self._copies = Copies(self._live, self._next)
        self._loaders = [
            (loader, {name: held[tensor] for name, tensor in wholes.items()})
            for loader, wholes in resolved.loaders
        ]

    def flip(self, want: Flipped) -> Problem | None:
        """Make the shadow live if it holds exactly what was decided. Repeated calls answer as the first.

        Returns None once the live weights are wholly `want`; a problem, and unchanged weights, if the shadow
        holds something else. An exception in the middle leaves `torn` set.
        """
        if self.live == want and not self.torn:
            return None
        stamp = self.slab.read_stamp()
        wanted = Published(version=want.version, sequence=want.round)
        if stamp != wanted:
            held = "nothing whole" if stamp is None else f"{stamp.version} of round {stamp.sequence}"
            return Problem(
                reason="ShadowNotVerified",
                message=f"the shadow holds {held}, not the verified {want.version} of round {want.round}; "
                "the live weights are unchanged",
            )
        first = self.live is None or self.live.epoch != want.epoch or self.live.object_uid != want.object_uid
        started = time.perf_counter()
        self.torn = True
        with torch.inference_mode():
            self._copies.run()
            self._synchronise()
        if (problem := self._load()) is not None:
            return problem
        # After the loader, which must not have touched it either.
        if first and (unlike := self._unlike()) is not None:
            return Problem(
                reason="FlipNotExact",
                message=f"after the copy {unlike} differs from what was verified: restart this server",
            )
        if self.slab.read_stamp() != wanted:
            return Problem(
                reason="ShadowOverwritten",
                message=f"the shadow was written while {want.version} was copied from it; "
                "the live weights are of no one version until a whole round succeeds",
            )
        self.seconds = time.perf_counter() - started
        log.info(
            "flipped to %s in %.4f s, of which vLLM's loader took %.4f s for %d parameters",
            want.version,
            self.seconds,
            self.loader_seconds,
            sum(len(wholes) for _, wholes in self._loaders),
        )
        self.live, self.torn = want, False
        return None

    def _load(self) -> Problem | None:
        """What cannot be copied, through vLLM's own loader."""
        if not self._loaders:
            return None
        started = time.perf_counter()
        try:
            for loader, wholes in self._loaders:
                # A copy, one at a time: loaders write to what they are given.
                loader.load(lambda name, wholes=wholes: wholes[name].clone())  # type: ignore[misc]
            self._synchronise()
        except LoaderError as e:
            return Problem(
                reason="LoaderFailed",
                message=f"{e}; the live weights are of no one version until a whole round succeeds"[:1024],
            )
        self.loader_seconds = time.perf_counter() - started
        return None

    def _synchronise(self) -> None:
        """Wait for the current stream: the reply of this call may not come before the copy."""
        if self.slab.device.type == "cuda":
            torch.cuda.current_stream(self.slab.device).synchronize()

    def _unlike(self) -> str | None:
        """The first tensor whose live bytes are not the shadow's: memory that something else writes or has
        moved."""
        for name, live, shadow in zip(self._names, self._live, self._next, strict=True):
            if not same_bits(live, shadow):
                return name
        return None
