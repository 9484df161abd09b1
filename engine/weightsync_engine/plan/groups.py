"""The workers of an epoch, and servers that are alike taken together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.tensors import WorkerManifest


@dataclass(frozen=True, slots=True)
class Worker:
    """One vLLM worker of the epoch. Workers of one `server` together hold whole copies of the model."""

    rank: int
    server: str
    manifest: WorkerManifest


@dataclass(frozen=True)
class Group:
    """Neighbouring servers with equal manifests: what is planned for one of them holds for all.

    Rank `first_rank + replica * width + position` is the worker at `position` of server `replica`.
    """

    first_rank: int
    servers: tuple[str, ...]
    manifests: tuple[WorkerManifest, ...]
    """Of one server's workers, by position."""

    @property
    def replicas(self) -> int:
        return len(self.servers)

    @property
    def width(self) -> int:
        """Workers of one server."""
        return len(self.manifests)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.replicas * self.width)

    def server_ranks(self, replica: int) -> range:
        first = self.first_rank + replica * self.width
        return range(first, first + self.width)


def group_workers(workers: Sequence[Worker]) -> tuple[Group, ...]:
    """Groups of workers that come in order of rank. Equal inputs give equal groups, shared manifests or not."""
    groups: list[Group] = []
    for server, members in itertools.groupby(workers, key=lambda w: w.server):
        ranks = list(members)
        manifests = tuple(w.manifest for w in ranks)
        last = groups[-1] if groups else None
        if last is not None and _alike(last.manifests, manifests):
            groups[-1] = Group(last.first_rank, (*last.servers, server), last.manifests)
        else:
            groups.append(Group(ranks[0].rank, (server,), manifests))
    return tuple(groups)


def _alike(one: tuple[WorkerManifest, ...], other: tuple[WorkerManifest, ...]) -> bool:
    # Manifests that came from one place are one object: compared by value only where that does not tell.
    return len(one) == len(other) and all(a is b or _equal(a, b) for a, b in zip(one, other, strict=True))


def _equal(a: WorkerManifest, b: WorkerManifest) -> bool:
    a, b = (dataclasses.replace(m, pieces=tuple(sorted(m.pieces, key=repr))) for m in (a, b))
    return a == b
