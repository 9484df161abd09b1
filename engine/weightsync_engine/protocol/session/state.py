"""What an agent knows (`Session`), what happens to it (`Event`), and what is to be done then (`Effect`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..messages import (
    DEFAULT_FLIP,
    EpochPhase,
    FlipPolicy,
    JoinEpoch,
    PlanSummary,
    Problem,
    Published,
    Refusal,
    Rendezvous,
    RoundPhase,
)
from ..mover import MoverJoin, MoverOutcome, MoverState, MoverTransfer

ORDER: dict[RoundPhase, int] = {
    RoundPhase.PREPARING: 0, RoundPhase.READY: 1, RoundPhase.TRANSFERRING: 2, RoundPhase.VERIFIED: 3,
    RoundPhase.COMMITTING: 4, RoundPhase.COMMITTED: 5, RoundPhase.ABORTED: 5, RoundPhase.FAILED: 5,
}  # fmt: skip


FINAL = frozenset({RoundPhase.COMMITTED, RoundPhase.ABORTED, RoundPhase.FAILED})


ASK_AGAIN_SECONDS = 5.0
"""A pod that is fenced for want of a decision asks the lead's agent this often."""


STANDING_SECONDS = 10.0
"""A pod that stands still for a transfer in place waits so long beyond its preparation for the transfer to begin."""


SETTLE_SECONDS = 10.0
"""After a transfer in place that failed, movers have so long to end, before the pod closes."""


LEARNT_FLIP_SECONDS = 60.0
"""Deadline of a flip whose decision was learnt from the lead's agent, where no commit request gave one."""


LEAST_JOIN_SECONDS = 0.5
"""With less time left a mover is not told to join any more."""
REMEMBERED_DECISIONS = 16


Verdict = Literal["committed", "aborted", "unknown"]


TORN = "the live weights are of no one version"


FIRST_CLOSED = "waiting for the operator to admit the weights that this server has loaded"


# ---- the session -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pod:
    """What does not change in an agent's life."""

    role: Literal["trainer", "inference"]
    boot_id: str
    name: str
    uid: str | None
    host: str
    """The pod's own address, on which its ranks listen."""
    local_ranks: int
    """Movers of this pod."""
    run_id: str = ""
    trainer_ranks: tuple[int, ...] = ()
    """Trainer: the global ranks in this pod, ascending and without gaps."""
    trainer_world: int = 0
    in_place: bool = False
    """Inference: the movers write to the live weights. The scheduler stands still from `prepare` to the flip."""

    @property
    def lead(self) -> bool:
        """Whether this pod hosts rank 0."""
        return self.role == "trainer" and 0 in self.trainer_ranks


@dataclass(frozen=True, slots=True)
class Epoch:
    request: JoinEpoch
    phase: EpochPhase
    deadline: float
    rendezvous: Rendezvous | None
    joined: dict[int, str] = field(default_factory=dict)
    """Local rank -> id of the mover that was told to join."""
    plan: PlanSummary | None = None
    problem: Problem | None = None
    round_floor: int = 0
    """Rounds up to this one are over, also such as never began here."""


@dataclass(frozen=True, slots=True)
class Round:
    epoch: int
    round: int
    version: str
    phase: RoundPhase
    deadline: float | None
    """End of the present phase's time: prepare or transfer."""
    decide_by: float | None
    sequence: int | None = None
    """Of the version within the trainer's run, where the operator said it."""
    flip: FlipPolicy = DEFAULT_FLIP
    flipping: bool = False
    held: bool = False
    """Told to halt for this round, or to stand still for its transfer in place: the scheduler stands still, or is about
    to, until the round is over here."""
    asking: bool = False
    fenced: bool = False
    """Verified, and no decision came in time: closed until there is one."""
    bytes_done: int = 0
    bytes_total: int = 0
    seconds: float | None = None
    content: str = ""
    problem: Problem | None = None
    stands: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Transfer: local rank -> the step that its mover was last seen in, and since when."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Whether generation passes. Open only with `admitted` live and whole."""

    open: bool = False
    admitted: str | None = None
    because: str = FIRST_CLOSED


@dataclass(frozen=True, slots=True)
class HaltMark:
    """The newest round that this pod was told to halt for, until it is over."""

    term: int
    epoch: int
    round: int
    step: Literal["asked", "done", "failed"] = "asked"

    @property
    def number(self) -> tuple[int, int]:
        return self.term, self.round


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A round whose movers were told to write to the live weights, and that ended otherwise than by going live. What
    is live can be asked only once none of them writes any more, and nothing may be generated until it is known."""

    epoch: int
    round: int
    movers: frozenset[str]
    """Ids of those that may still write."""
    held: bool
    """The scheduler stands still since before the transfer."""
    problem: Problem | None = None
    """Why the round failed."""
    deadline: float | None = None
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    object_uid: str
    epoch: int
    round: int
    verdict: Verdict
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Session:
    pod: Pod
    object_uid: str | None = None
    term: int = 0
    last_epoch: int = 0
    """Highest epoch ever joined or left, for this object."""
    epoch: Epoch | None = None
    round: Round | None = None
    movers: dict[int, MoverState] = field(default_factory=dict)
    met: frozenset[int] = frozenset()
    """Local ranks whose mover has been up at some time."""
    """Local rank -> what its mover said last. Absent: no mover is connected."""
    condemned: frozenset[str] = frozenset()
    """Movers that were told to die: whatever they still say counts for nothing."""
    published: Published | None = None
    committed: str | None = None
    live: str | None = None
    torn: bool = False
    live_known: bool = False
    """Whether the workers have been asked yet."""
    guard: Guard = Guard()
    unsettled: Unsettled | None = None
    halt: HaltMark | None = None
    over: tuple[int, int] = (0, 0)
    """(term, round): this one and the earlier ones are over, whatever still arrives for them."""
    decisions: tuple[Decided, ...] = ()


# ---- effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenStore:
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseStore:
    epoch: int


@dataclass(frozen=True, slots=True)
class JoinMover:
    local_rank: int
    message: MoverJoin


@dataclass(frozen=True, slots=True)
class StartTransfer:
    local_rank: int
    message: MoverTransfer


@dataclass(frozen=True, slots=True)
class LeaveMovers:
    epoch: int


@dataclass(frozen=True, slots=True)
class KillMovers:
    movers: tuple[tuple[int, str], ...]
    """(local rank, mover id)"""
    why: str


@dataclass(frozen=True, slots=True)
class Flip:
    object_uid: str
    epoch: int
    round: int
    version: str
    deadline_seconds: float
    policy: FlipPolicy


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop the scheduler, with running requests as the policy says, until `GoOn`, `EndRequests` or a flip that
    succeeds."""

    epoch: int
    round: int
    policy: FlipPolicy
    deadline_seconds: float


@dataclass(frozen=True, slots=True)
class GoOn:
    """Let a scheduler that `Hold` stopped, or is about to stop, go on."""


@dataclass(frozen=True, slots=True)
class EndRequests:
    """The guard is closed: end what runs, so that nothing more is generated, and let the scheduler go on."""

    mark: tuple[int, int] = (0, 0)
    """(term, round) that the pod halts for, if it is for that."""


@dataclass(frozen=True, slots=True)
class AskLive:
    """Ask the workers now what they hold, and answer with `Settled` in any case."""

    epoch: int
    round: int


@dataclass(frozen=True, slots=True)
class AskDecision:
    lead: Rendezvous
    object_uid: str
    epoch: int
    round: int
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class OpenGuard:
    version: str | None


@dataclass(frozen=True, slots=True)
class CloseGuard:
    because: str


@dataclass(frozen=True, slots=True)
class TellOutcome:
    local_ranks: tuple[int, ...]
    message: MoverOutcome


Effect = (
    OpenStore | CloseStore | JoinMover | StartTransfer | LeaveMovers | KillMovers | Flip | Hold | GoOn
    | EndRequests | AskLive | AskDecision | OpenGuard | CloseGuard | TellOutcome
)  # fmt: skip


# ---- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoverReported:
    local_rank: int
    state: MoverState


@dataclass(frozen=True, slots=True)
class MoverLost:
    """The connection to a mover ended: it is dead, or as good as dead."""

    local_rank: int
    mover_id: str


@dataclass(frozen=True, slots=True)
class StoreOpened:
    epoch: int
    rendezvous: Rendezvous


@dataclass(frozen=True, slots=True)
class StoreFailed:
    epoch: int
    problem: Problem


@dataclass(frozen=True, slots=True)
class FlipEnded:
    """`live` and `torn`: what the workers hold now, whatever became of the flip."""

    epoch: int
    round: int
    problem: Problem | None
    live: str | None
    torn: bool


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """The scheduler stands still for this round; with a problem it goes on as before."""

    epoch: int
    round: int
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class RequestsEnded:
    mark: tuple[int, int]
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class LiveObserved:
    live: str | None
    torn: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to `AskLive`. Workers that do not say what they hold are torn."""

    epoch: int
    round: int
    live: str | None
    torn: bool


@dataclass(frozen=True, slots=True)
class DecisionLearnt:
    epoch: int
    round: int
    verdict: Verdict
    """`unknown` also when the lead's agent gave no answer."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """`next_deadline` has come."""


Event = (
    MoverReported | MoverLost | StoreOpened | StoreFailed | FlipEnded | HoldEnded | RequestsEnded
    | LiveObserved | Settled | DecisionLearnt | TimePassed
)  # fmt: skip


# ---- answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    session: Session
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    refusal: Refusal


Answer = Accepted | Refused


def refuse(reason: str, message: str) -> Refused:
    return Refused(Refusal(reason=reason, message=message))


def clip(text: str) -> str:
    return text if len(text) <= 1024 else text[:1021] + "..."


def make_problem(reason: str, message: str, rank: int | None = None) -> Problem:
    return Problem(reason=reason, message=clip(message), rank=rank)
