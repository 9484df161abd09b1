"""Which transport an epoch uses: by the device that holds the weights, or as the object says."""

from __future__ import annotations

from ..transport.base import Failure, Transport
from .gloo import GlooTransport

NAMES = ("auto", "gloo", "nccl_m2n", "nccl_p2p")


def choose(name: str, device: str, rank: int) -> type[Transport]:
    """The transport called `name` for slabs on `device` ("cpu", "cuda"). Raises `Failure` NoTransport with what to
    write instead."""
    if name not in NAMES:
        raise Failure(
            "NoTransport", f"rank {rank}: there is no transport {name!r}; there are {', '.join(NAMES)}", rank
        )
    if device == "cpu":
        if name not in ("auto", "gloo"):
            raise Failure(
                "NoTransport",
                f"rank {rank} holds its weights in host memory: transport {name!r} needs a GPU; use auto or gloo",
                rank,
            )
        return GlooTransport
    if name == "gloo":
        raise Failure(
            "NoTransport",
            f"rank {rank} holds its weights on a GPU: transport 'gloo' moves host memory; use auto, nccl_m2n or "
            "nccl_p2p",
            rank,
        )
    from .nccl import M2NTransport, P2PTransport  # needs the libraries of the extra "cuda"

    return P2PTransport if name == "nccl_p2p" else M2NTransport
