"""The messages on a mover's socket: between a mover and whoever drives it (the pod's agent, or a worker alone).

A unix stream socket at the path that the parent chose; one JSON object a line. The driver sends `MoverRequest`s;
the mover pushes its whole `MoverState` after each change and right after a driver connects. Nothing is answered
one by one: a driver reads the outcome from the state, and may repeat a request.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .messages import (
    EpochPhase,
    Message,
    PlanSummary,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
    Seconds,
    Version,
)


class MoverEpoch(Message):
    object_uid: str
    term: int
    epoch: int
    phase: EpochPhase
    plan: PlanSummary | None = None
    problem: Problem | None = None
    reusable: bool = False
    """JOINING or FAILED: the mover has met its peers in the epoch's store only, and can join another one as it is."""


class MoverRound(Message):
    epoch: int
    round: int
    version: Version
    phase: RoundPhase
    """TRANSFERRING, VERIFIED or FAILED: the rest of a round is the agent's."""
    step: int = 0
    steps: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    seconds: float | None = None
    content: str = ""
    """On rank 0, once verified: one word for the weights, equal for equal bits."""
    problem: Problem | None = None


class MoverState(Message):
    mover_id: str
    """Random, one for each mover process: another one means that the former is gone, and its epoch with it."""
    pid: int
    local_rank: int
    snapshot: Published | None = None
    """Trainer: the version stamped on the slab, once the copy has ended."""
    epoch: MoverEpoch | None = None
    round: MoverRound | None = None


class MoverJoin(Message):
    op: Literal["join"] = "join"
    object_uid: str
    term: int
    epoch: int
    rank: int
    world_size: int
    trainer_ranks: int
    rendezvous: Rendezvous
    key: Annotated[str, Field(repr=False)]
    host: str
    """The pod's own address, on which this rank listens for its peers."""
    transport: str
    server: str
    """Names the server (pod) that this rank belongs to: ranks of one server make up one copy of the model."""
    who: str = ""
    """This rank in words, such as `pod vllm-1, worker 1`: what its peers say of it when it is late."""
    deadline_seconds: Seconds


class MoverTransfer(Message):
    op: Literal["transfer"] = "transfer"
    epoch: int
    round: int
    version: Version
    deadline_seconds: Seconds


class MoverOutcome(Message):
    """Trainer: what becomes of a published version. The mover hands it to the training process.

    Neither committed, nor a problem, nor final: a round has taken the version up, and its bytes travel from now.
    """

    op: Literal["outcome"] = "outcome"
    version: Version
    committed: bool
    problem: Problem | None = None
    """Of a round that failed and will be tried again, or of one that is given up."""
    final: bool = True


class MoverLeave(Message):
    op: Literal["leave"] = "leave"
    epoch: int


MoverRequest = Annotated[MoverJoin | MoverTransfer | MoverOutcome | MoverLeave, Field(discriminator="op")]
