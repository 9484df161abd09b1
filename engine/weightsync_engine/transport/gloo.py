"""Steps over gloo, between host memory of the ranks, outside any default process group."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from ..plan.plan import LocalStep
from ..plan.validate import Envelope
from .base import LocalTensor, Transport
from .failure import Failure, PeerFailure
from .store import EpochStore, GlooStore

_PIECE_BYTES = 64 << 20
"""One message; a peer that moves less than this in the stall time counts as gone."""
_TAGS = 1 << 30


class GlooTransport(Transport):
    """A gloo process group of `world` ranks, met through the epoch's signed store.

    Connects to every peer. Raises `PeerFailure` that names the rank whose address did not come by `deadline`
    (monotonic seconds), or `Failure` if `host` is not an address of this pod.
    """

    envelope = Envelope(max_local_bytes=64 << 20)
    collective = False
    depth = 1
    check_bytes = 0

    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        self._rank, self._store = rank, store
        self._tags: dict[tuple[int, bool], int] = {}
        self._begun: deque[_Begun] = deque()
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        except RuntimeError as e:
            raise Failure("BadAddress", f"rank {rank} cannot listen on {host!r}: {str(e)[:200]}", rank) from e
        options._timeout = timedelta(seconds=max(deadline - time.monotonic(), 1.0))
        options._threads = 2
        try:
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                GlooStore(store, deadline), rank, world, options
            )
        except RuntimeError as e:
            raise PeerFailure(
                "ConnectFailed",
                f"rank {rank} could not connect to all its peers by gloo: {str(e)[:300]}",
                rank,
            ) from e

    @staticmethod
    def runtime() -> dict[str, Any]:
        return {}

    def begin(self, step: LocalStep, local: LocalTensor) -> None:
        begun = _Begun(step)
        for block in step.blocks:
            regions = [local(part) for part in block.parts]
            alone = regions[0].reshape(-1) if len(regions) == 1 and regions[0].is_contiguous() else None
            if step.sends:
                data = alone if alone is not None else torch.cat([r.reshape(-1) for r in regions])
            elif alone is not None:
                data = alone
            else:
                data = torch.empty(sum(r.numel() for r in regions), dtype=regions[0].dtype)
                begun.arriving.append((regions, data))
            for peer in block.peers:
                begun.pending += self._post(data.view(torch.uint8), peer, step.sends)
        self._begun.append(begun)

    def finish(self, stall_seconds: float, moved: Callable[[int], None]) -> None:
        begun = self._begun.popleft()
        for work, peer, data in begun.pending:
            self._finish(work, peer, begun.step, stall_seconds)
            moved(data.numel())
        for regions, data in begun.arriving:
            for region, flat in zip(regions, torch.split(data, [r.numel() for r in regions]), strict=True):
                region.copy_(flat.view(region.shape))

    def close(self) -> None:
        group, self._group = self._group, None
        self._begun.clear()
        del group  # its connections end with it; shutdown() would wait for peers

    def _post(self, data: torch.Tensor, peer: int, sending: bool) -> list[tuple[object, int, torch.Tensor]]:
        if self._group is None:
            raise PeerFailure("Closed", "the communicator is closed", self._rank)
        posted: list[tuple[object, int, torch.Tensor]] = []
        for start in range(0, data.numel(), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            tag = self._tags.get((peer, sending), 0)
            self._tags[peer, sending] = (tag + 1) % _TAGS
            try:
                group: Any = self._group
                work = (group.send if sending else group.recv)([piece], peer, tag)
            except RuntimeError as e:
                raise self._lost(peer, e) from e
            posted.append((work, peer, piece))
        return posted

    def _finish(self, work: object, peer: int, step: LocalStep, stall_seconds: float) -> None:
        try:
            work.wait(timedelta(seconds=stall_seconds))  # type: ignore[attr-defined]
        except RuntimeError as e:
            if "Timed out" in str(e):
                raise PeerFailure(
                    "PeerLate",
                    f"{self._store.named(peer)} has moved nothing of {self._store.step(step.index)} for "
                    f"{stall_seconds:.1f} s: its mover is frozen, starved or cut off; it is replaced when its "
                    "pod's agent kills it",
                    peer,
                ) from e
            raise self._lost(peer, e) from e

    def _lost(self, peer: int, error: RuntimeError) -> PeerFailure:
        return PeerFailure(
            "PeerLost",
            f"the connection of rank {self._rank} to {self._store.named(peer)} broke: its mover or pod died, or "
            f"the network between "
            f"them ({str(error)[:200]})",
            peer,
        )


@dataclass
class _Begun:
    step: LocalStep
    pending: list[tuple[object, int, torch.Tensor]] = field(default_factory=list)
    """(work, peer, bytes) of each message."""
    arriving: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    """Regions to fill from what arrives in one piece."""
