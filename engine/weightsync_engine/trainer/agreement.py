"""How the trainer ranks agree: small messages over a gloo group of their own, each with a deadline.

What they say to each other is JSON: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .handle import PublishError


class Peers(Protocol):
    """All trainer ranks."""

    rank: int
    world: int

    def gather(self, said: dict[str, Any], what: str, timeout: float) -> list[dict[str, Any]]:
        """What every rank said, in order of rank. Raises `PublishError` naming who did not come to `what`."""

    def share(self, data: bytes, what: str, timeout: float) -> list[bytes]:
        """As `gather`, for large values that most ranks have alike: each value travels once, and is one object
        for all ranks that have it."""


class Alone:
    """A single process without torch.distributed."""

    rank, world = 0, 1

    def gather(self, said: dict[str, Any], what: str, timeout: float) -> list[dict[str, Any]]:
        return [json.loads(json.dumps(said))]

    def share(self, data: bytes, what: str, timeout: float) -> list[bytes]:
        return [data]


class GlooPeers:
    """All ranks of the default process group. Making one is a collective call; so is `gather`."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # A group of our own: nothing of ours can be mistaken for, or wait behind, the training's collectives.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._broken = ""

    def gather(self, said: dict[str, Any], what: str, timeout: float) -> list[dict[str, Any]]:
        if self._broken:
            raise PublishError(self._broken)
        if not dist.is_initialized():
            raise PublishError(f"torch.distributed was destroyed before {what}")
        try:
            # Names the ranks that are missing, which a collective that times out does not.
            dist.monitored_barrier(self._group, timedelta(seconds=timeout), wait_all_ranks=True)
            return self._gather(json.dumps(said).encode())
        except RuntimeError as e:
            first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            self._broken = (
                f"not every trainer rank came to {what} within {timeout:g} s, and the ranks are out of step: "
                f"call it on every rank, then make a new Publisher ({first})"
            )
            raise PublishError(self._broken) from None

    def share(self, data: bytes, what: str, timeout: float) -> list[bytes]:
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        every = self.gather({"digest": digest, "size": len(data)}, what, timeout)
        values: dict[str, bytes] = {}
        for rank, said in enumerate(every):
            if said["digest"] not in values:
                values[said["digest"]] = self._from(rank, data, said["size"], what, timeout)
        return [values[said["digest"]] for said in every]

    def _from(self, rank: int, data: bytes, size: int, what: str, timeout: float) -> bytes:
        value = torch.zeros(size, dtype=torch.uint8)
        if rank == self.rank:
            value = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            dist.broadcast(value, src=rank, group=self._group)  # within the group's deadline
        except RuntimeError as e:
            self._broken = f"the ranks are out of step after {what}: make a new Publisher ({str(e)[:200]})"
            raise PublishError(self._broken) from None
        return value.numpy().tobytes()

    def _gather(self, data: bytes) -> list[dict[str, Any]]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        largest = max(int(size) for size in sizes)
        mine = torch.zeros(largest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.zeros(largest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self._group)
        return [json.loads(e.numpy().tobytes()[: int(n)]) for e, n in zip(every, sizes, strict=True)]


def peers(timeout: float) -> Peers:
    """The trainer's ranks as they are. Raises `PublishError` where there should be several and are not."""
    if dist.is_available() and dist.is_initialized():
        return Alone() if dist.get_world_size() == 1 else GlooPeers(timeout)
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise PublishError(
            f"torch.distributed is not up, and WORLD_SIZE is {world}: call "
            "torch.distributed.init_process_group() on every rank before Publisher(...)"
        )
    return Alone()
