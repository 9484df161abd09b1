"""Which transport an epoch uses: by the device that holds the weights, or as the object says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..plan.validate import Envelope
from ..protocol.names import ENV_STEP_BYTES
from .base import Transport
from .failure import Failure
from .gloo import GlooTransport

MOST_STEP_BYTES = 2 << 30
"""M2N refuses a larger share of a step, and from 4 GiB on hangs."""
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


def envelope(kind: type[Transport], environment: Mapping[str, str], rank: int) -> Envelope:
    """What the transport's steps may be, with the user's own size of a step. Raises `Failure` BadSetting."""
    given = environment.get(ENV_STEP_BYTES, "").strip()
    if not given:
        return kind.envelope
    size = int(given) if given.isdigit() else 0
    if not 8 <= size <= MOST_STEP_BYTES:
        raise Failure(
            "BadSetting",
            f"rank {rank}: {ENV_STEP_BYTES}={given!r} must be a whole number of bytes from 8 to {MOST_STEP_BYTES}",
            rank,
        )
    return dataclasses.replace(kind.envelope, max_local_bytes=size)
