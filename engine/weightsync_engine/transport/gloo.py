"""Steps over gloo, between host memory of the ranks, outside any default process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from ..layout.boxes import Box
from ..plan.steps import LocalPart, Side, Step, exchanges
from .base import Failure, LocalTensor, PeerFailure
from .store import EpochStore, GlooStore

_PIECE_BYTES = 64 << 20
"""One message; a peer that moves less than this in the stall time counts as gone."""
_TAGS = 1 << 30


class GlooTransport:
    """A gloo process group of `world` ranks, met through the epoch's signed store.

    Connects to every peer. Raises `PeerFailure` that names the rank whose address did not come by `deadline`
    (monotonic seconds), or `Failure` if `host` is not an address of this pod.
    """

    def __init__(self, store: EpochStore, rank: int, world: int, host: str, deadline: float) -> None:
        self._rank = rank
        self._tags: dict[tuple[int, int], int] = {}
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

    def run(self, step: Step, local: LocalTensor, stall_seconds: float, moved: Callable[[int], None]) -> None:
        if self._group is None:
            raise PeerFailure("Closed", "the communicator is closed", self._rank)
        pending: list[tuple[object, int, torch.Tensor]] = []
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        own = [e for e in exchanges(step) if self._rank in (e.source, e.target)]
        sent = self._shared(step, step.source, local) if any(e.source == self._rank for e in own) else None
        into = None
        if any(e.target == self._rank for e in own):
            part = self._part(step.target)
            region = local(part)
            shape = step.target.local_box(step.shape, self._rank - step.target.first_rank).shape
            if part.staged:
                into = torch.empty(shape, dtype=region.dtype)
                staged.append((region, into.view(part.box.shape)))
            else:
                into = region.view(shape)
        writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for e in own:
            if e.source == self._rank:
                assert sent is not None
                data = _bytes(sent[_slices(e.source_box)].contiguous())
                pending += self._post(data, e.source, e.target)
            else:
                assert into is not None
                goal = into[_slices(e.target_box)]
                buffer = goal if goal.is_contiguous() else torch.empty(goal.shape, dtype=goal.dtype)
                if buffer is not goal:
                    writes.append((goal, buffer))
                pending += self._post(_bytes(buffer), e.source, e.target)
        for work, peer, data in pending:
            self._finish(work, peer, step, stall_seconds)
            moved(data.numel())
        for goal, buffer in (*writes, *staged):
            goal.copy_(buffer)

    def close(self) -> None:
        group, self._group = self._group, None
        del group  # its connections end with it; shutdown() would wait for peers

    def _part(self, side: Side) -> LocalPart:
        return side.parts[self._rank - side.first_rank]

    def _shared(self, step: Step, side: Side, local: LocalTensor) -> torch.Tensor:
        """This rank's share of the step's tensor; a view where its region is one run of memory."""
        shape = side.local_box(step.shape, self._rank - side.first_rank).shape
        return local(self._part(side)).reshape(shape)

    def _post(self, data: torch.Tensor, source: int, target: int) -> list[tuple[object, int, torch.Tensor]]:
        assert self._group is not None
        posted: list[tuple[object, int, torch.Tensor]] = []
        for start in range(0, data.numel(), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            tag = self._tags.get((source, target), 0)
            self._tags[source, target] = (tag + 1) % _TAGS
            sending = source == self._rank
            peer = target if sending else source
            try:
                group: Any = self._group
                work = (group.send if sending else group.recv)([piece], peer, tag)
            except RuntimeError as e:
                raise self._lost(peer, e) from e
            posted.append((work, peer, piece))
        return posted

    def _finish(self, work: object, peer: int, step: Step, stall_seconds: float) -> None:
        try:
            work.wait(timedelta(seconds=stall_seconds))  # type: ignore[attr-defined]
        except RuntimeError as e:
            if "Timed out" in str(e):
                raise PeerFailure(
                    "PeerLate",
                    f"rank {peer} moved nothing of {step.name!r} for {stall_seconds:.1f} s: its "
                    f"mover is frozen, starved "
                    "or cut off; it is replaced when its pod's agent kills it",
                    peer,
                ) from e
            raise self._lost(peer, e) from e

    def _lost(self, peer: int, error: RuntimeError) -> PeerFailure:
        return PeerFailure(
            "PeerLost",
            f"the connection of rank {self._rank} to rank {peer} broke: its mover or pod died, or "
            f"the network between "
            f"them ({str(error)[:200]})",
            peer,
        )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
