"""The messages between the operator and the agents: one protocol for both roles.

The operator only ever does two things to an agent: it reads `AgentState` (GET, long poll), and it posts one of
the `Addressed` requests, each answered at once with the `AgentState` that follows from it. Work goes on behind
the answer; its outcome is read from a later state. So a lost answer costs nothing: the request is idempotent,
and the state tells what became of it.

Refusals (HTTP): 401 no valid credential; 409 `Refusal` another process, an older term, epoch or round, or a
request that does not fit the state; 422 a malformed request. All carry a `Refusal` body.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .names import PROTOCOL_VERSION

Version = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
"""The trainer's name of the weights. A label value, so that it can be shown anywhere in Kubernetes."""

Seconds = Annotated[float, Field(gt=0, le=86400)]


class Message(BaseModel):
    """Base of everything on the wire: frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(Message):
    """Why something failed: a CamelCase reason, a sentence that names culprit and remedy, and where it is."""

    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z0-9]{0,63}$")]
    message: Annotated[str, Field(max_length=1024)]
    rank: int | None = None
    """The culprit's rank in the epoch, where one rank is to blame. The operator knows its pod."""


class Refusal(Message):
    """Body of every 4xx answer."""

    reason: str
    message: str


# ---- state -------------------------------------------------------------------------------------------------


class EpochPhase(StrEnum):
    JOINING = "Joining"
    JOINED = "Joined"
    """Communicator up, plan computed, its digest agreed with every other rank."""
    FAILED = "Failed"


class RoundPhase(StrEnum):
    PREPARING = "Preparing"
    """Trainer: not all local ranks hold the version in their snapshot yet. Inference: the scheduler does not yet stand
    still for a transfer in place."""
    READY = "Ready"
    TRANSFERRING = "Transferring"
    VERIFIED = "Verified"
    """All steps done and every digest equal: this pod can commit. On a trainer: all its sends are confirmed."""
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    ABORTED = "Aborted"
    FAILED = "Failed"


class Rendezvous(Message):
    """Where the epoch's store listens: in the agent that hosts rank 0, on the pod's own address."""

    host: str
    port: Annotated[int, Field(gt=0, lt=65536)]


class PlanSummary(Message):
    """What `kubectl describe` may show of a plan. Nothing here grows with the model."""

    digest: str
    parameters: int
    direct: int
    fallback: int
    unused: int = 0
    """Of what the trainer has, beside `parameters`: what no server makes use of."""
    draft: int = 0
    """Of `parameters`: what only draft models need."""
    rounded: int = 0
    """Of `parameters`: those that lose bits on their way which the trainer means to keep."""
    bytes_total: int
    """Bytes that all ranks together receive in a round."""
    steps: int
    reasons: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """The first reasons for parameters that are not direct."""
    first_rounded: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Which ones, each with both dtypes."""

    @property
    def rounding(self) -> str:
        """What to tell of them; nothing if there are none."""
        return rounding(self.rounded, self.first_rounded)


ROUNDED_SHOWN = 4
"""Parameters that are named; the rest is counted."""


def rounded_words(name: str, have: str, wire: str) -> str:
    return f"{name} ({have} to {wire})"


def rounding(count: int, first: Sequence[str]) -> str:
    """Of parameters that lose bits on their way: how many, which, and why that is told."""
    if not count:
        return ""
    shown = tuple(first[:ROUNDED_SHOWN])
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return (
        f"{count} rounded on the way, with fewer bits in the servers than the trainer computes with: "
        f"{', '.join(shown)}{more}"
    )


class EpochState(Message):
    term: int
    epoch: int
    phase: EpochPhase
    rendezvous: Rendezvous | None = None
    """Only on the lead: set as soon as the store listens."""
    plan: PlanSummary | None = None
    problem: Problem | None = None


class RoundState(Message):
    epoch: int
    round: int
    version: Version
    phase: RoundPhase
    bytes_done: int = 0
    """Bytes that this pod's ranks have received (inference) or sent (trainer) so far."""
    bytes_total: int = 0
    seconds: float | None = None
    """Duration of the transfer, verification included, once it has ended."""
    content: Annotated[str, Field(max_length=64)] = ""
    """From the lead, once verified: one word for the weights, equal for equal bits, whatever the version."""
    problem: Problem | None = None


class Published(Message):
    version: Version
    sequence: int
    """1, 2, 3, ... within one run of the trainer."""


class TrainerFacts(Message):
    run_id: str
    """Random, drawn by rank 0 when the publisher is made and shared by all trainer ranks."""
    ranks: tuple[int, ...]
    """The trainer's global ranks in this pod, ascending."""
    world_size: int
    published: Published | None = None
    """The newest version that all ranks of this pod hold in their snapshot."""
    committed: Version | None = None


class Halted(Message):
    """Which round a pod generates nothing for. A number means something in its term only."""

    term: int
    round: int


class InferenceFacts(Message):
    workers: int
    """Ranks that this pod takes in an epoch: its vLLM workers."""
    live_version: Version | None = None
    """What the workers hold. None: the weights that vLLM loaded at its start. A fact of the workers, not the agent."""
    torn: bool = False
    """The live weights are of no one version."""
    in_place: bool = False
    """Transfers write to the live weights: nothing is generated meanwhile, and one that fails leaves them torn."""
    serving: bool = False
    """The guard lets generation through."""
    closed_because: str = ""
    """What /readyz waits for, in words, while not serving."""
    starting: bool = False
    """Not every mover has been up yet since this agent began: an epoch with this pod would wait for them."""
    halted: Halted | None = None
    """Not a token is generated here until this round is over: as `Halt` asked for, and done."""


class AgentState(Message):
    protocol: int = PROTOCOL_VERSION
    role: Literal["trainer", "inference"]
    boot_id: Annotated[str, Field(min_length=8, max_length=64)]
    """Random; another one means another process, which knows nothing of what the former was told."""
    pod_name: str
    pod_uid: str | None = None
    revision: int
    """Grows with every change of this state: what the long poll waits for."""
    trainer: TrainerFacts | None = None
    inference: InferenceFacts | None = None
    object_uid: str | None = None
    """The WeightSync object that `epoch` and `round` belong to: another object's numbers may be the same."""
    epoch: EpochState | None = None
    round: RoundState | None = None
    """The newest round of that epoch."""
    problem: Problem | None = None
    """Why this pod cannot take part at all, for example a vLLM server started without the backend."""


# ---- requests ----------------------------------------------------------------------------------------------


class Addressed(Message):
    """What every request carries: for which process, of which object, by which operator start."""

    protocol: int = PROTOCOL_VERSION
    boot_id: str
    object_uid: Annotated[str, Field(min_length=1, max_length=64)]
    term: Annotated[int, Field(ge=1)]


class JoinEpoch(Addressed):
    """Take ranks `[first_rank, first_rank + own ranks)` of a new epoch. Drops any older one."""

    epoch: Annotated[int, Field(ge=1)]
    first_rank: Annotated[int, Field(ge=0, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=65536)]
    trainer_ranks: Annotated[int, Field(ge=1, le=65535)]
    rendezvous: Rendezvous | None = None
    """None for the lead alone, which opens the store and reports where it listens."""
    key: Annotated[str, Field(min_length=32, max_length=128, repr=False)]
    """Secret of the epoch: authenticates ranks in the store and agents to each other."""
    lead_agent: Rendezvous
    """The lead's agent, for a verified pod that has heard nothing of the decision."""
    transport: Literal["auto", "gloo", "nccl_m2n", "nccl_p2p"] = "auto"
    deadline_seconds: Seconds


class FlipPolicy(Message):
    """What becomes, at the flip, of requests that run and of what was computed with the old weights."""

    requests: Literal["keep", "wait", "abort"] = "keep"
    """keep: they stand still for the flip and go on after it. wait: the flip waits until they have ended. abort: they
    end at once, with what they have."""
    prefix_cache: Literal["reset", "kept"] = "reset"
    """reset: what goes on has its keys and values computed anew. kept: it goes on with the old ones, and so does any
    new request whose beginning is in the cache."""


DEFAULT_FLIP = FlipPolicy()


class Prepare(Addressed):
    epoch: int
    round: Annotated[int, Field(ge=1)]
    version: Version
    sequence: int | None = None
    """`Published.sequence` of the version: a trainer that holds a later one says so at once. None: not known, and
    only the deadline tells that the version will not come."""
    deadline_seconds: Seconds
    decide_by_seconds: Seconds
    """A verified pod that has heard no decision this long after Prepare asks the lead's agent, then fences itself."""
    flip: FlipPolicy = DEFAULT_FLIP
    """Of this round's flip, however this pod learns of the decision."""


class Transfer(Addressed):
    epoch: int
    round: int
    deadline_seconds: Seconds


class Halt(Addressed):
    """Generate nothing until this round is over: its flips may come at any time anywhere else.

    A verified member of the round stops its scheduler; commit or abort ends that. If neither comes in time, it asks
    the lead's agent, and without an answer it closes, ends what runs, and lets its scheduler go on. Any other pod
    closes and ends what runs, and opens again by an `Admit` that says that the round is over.
    """

    epoch: int
    round: int
    deadline_seconds: Seconds
    """For both together: to stop, and to hear of the decision."""


class Commit(Addressed):
    """The decision, recorded in the object before this was sent: make the version live (trainer: mirror it)."""

    epoch: int
    round: int
    version: Version
    deadline_seconds: Seconds


class Abort(Addressed):
    epoch: int
    round: int
    problem: Problem
    final: bool = False
    """The version is given up: no further round will try it, and whoever waits for it in the trainer is told so."""


class Admit(Addressed):
    """The operator's word that `version` is what the fleet serves: the agent opens its guard if it is live here."""

    version: Version | None
    """None: the weights that vLLM loaded are good enough, as no version has been committed yet."""
    after: int = 0
    """Rounds of this term up to this one are over: a pod halted for a later one stays closed."""


class Fence(Addressed):
    """Close the guard: this pod is out of sync with the fleet."""

    problem: Problem


class Leave(Addressed):
    """Forget the epoch; go on serving as you are."""

    epoch: int


REQUESTS: dict[str, type[Addressed]] = {
    "join": JoinEpoch,
    "prepare": Prepare,
    "transfer": Transfer,
    "halt": Halt,
    "commit": Commit,
    "abort": Abort,
    "admit": Admit,
    "fence": Fence,
    "leave": Leave,
}
"""Last part of the route `ROUTE_PREFIX + name` -> the request it takes."""
