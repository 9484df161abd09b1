"""The agent's session machine, pure: what an agent knows, and what each request and each event makes of it.

`handle` answers the operator's requests, `observe` takes in everything else (movers, flips, time). Both
return a new `Session` and effects, which the agent carries out; what comes of them returns as events. Nothing
here does I/O or reads a clock: `now` is in seconds of any monotonic clock.

A round's phase only moves forward (`ORDER`); `COMMITTED`, `ABORTED` and `FAILED` are final. A flip that fails
leaves the round `COMMITTING` with its problem, the guard closed: the decision stands, and a repeated commit
tries again.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field, replace
from typing import Literal

from .messages import (
    DEFAULT_FLIP,
    Abort,
    Addressed,
    Admit,
    AgentState,
    Commit,
    EpochPhase,
    EpochState,
    Fence,
    FlipPolicy,
    Halt,
    Halted,
    InferenceFacts,
    JoinEpoch,
    Leave,
    Message,
    PlanSummary,
    Prepare,
    Problem,
    Published,
    Refusal,
    Rendezvous,
    RoundPhase,
    RoundState,
    TrainerFacts,
    Transfer,
)
from .mover import MoverJoin, MoverOutcome, MoverState, MoverTransfer
from .names import PROTOCOL_VERSION

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


def _refuse(reason: str, message: str) -> Refused:
    return Refused(Refusal(reason=reason, message=message))


def _clip(text: str) -> str:
    return text if len(text) <= 1024 else text[:1021] + "..."


def _problem(reason: str, message: str, rank: int | None = None) -> Problem:
    return Problem(reason=reason, message=_clip(message), rank=rank)


# ---- requests ----------------------------------------------------------------------------------------------


def handle(session: Session, request: Addressed, now: float) -> Answer:
    """Answer one request of the operator. A refusal changes nothing."""
    answer = _handle(session, request, now)
    if isinstance(answer, Refused):
        return answer
    after, effects = _settle(answer.session, now)
    return Accepted(after, answer.effects + effects)


def _handle(session: Session, request: Addressed, now: float) -> Answer:
    pod = session.pod
    if request.protocol != PROTOCOL_VERSION:
        return _refuse(
            "ProtocolMismatch",
            f"the operator speaks protocol {request.protocol}, this agent {PROTOCOL_VERSION}: "
            "upgrade the older one",
        )
    if request.boot_id != pod.boot_id:
        return _refuse(
            "AnotherProcess",
            f"the request is meant for process {request.boot_id!r}, this is {pod.boot_id!r}: "
            "it restarted and knows nothing of what was before",
        )
    if session.object_uid not in (None, request.object_uid):
        if not isinstance(request, JoinEpoch | Halt | Admit | Fence | Leave):
            return _refuse(
                "AnotherObject", "this agent belongs to another WeightSync object; it knows no such epoch"
            )
        if session.round is not None and session.round.flipping:
            return _refuse(
                "FlipRunning", "a flip for the former WeightSync object is still running; try again"
            )
        session, dropped = _drop_epoch(session)
        session = replace(
            session, object_uid=request.object_uid, term=request.term, last_epoch=0, halt=None, over=(0, 0)
        )
        answer = _dispatch(session, request, now)
        return Accepted(answer.session, dropped + answer.effects) if isinstance(answer, Accepted) else answer
    if request.term < session.term:
        return _refuse(
            "OlderTerm", f"term {request.term} is over: the operator of term {session.term} has taken over"
        )
    return _dispatch(replace(session, object_uid=request.object_uid, term=request.term), request, now)


def _dispatch(session: Session, request: Addressed, now: float) -> Answer:
    match request:
        case JoinEpoch():
            return _join(session, request, now)
        case Prepare():
            return _prepare(session, request, now)
        case Transfer():
            return _transfer(session, request, now)
        case Halt():
            return _halt(session, request, now)
        case Commit():
            return _commit(session, request)
        case Abort():
            return _abort(session, request)
        case Admit():
            return _admit(session, request)
        case Fence():
            if session.pod.role != "inference":
                return _refuse("WrongRole", "a trainer pod serves nothing and cannot be fenced")
            return Accepted(*_close(session, request.problem.message))
        case Leave():
            return _leave(session, request)
    return _refuse("UnknownRequest", f"no such request: {type(request).__name__}")


def _join(session: Session, request: JoinEpoch, now: float) -> Answer:
    pod, old = session.pod, session.epoch
    if old is not None and request.epoch == old.request.epoch:
        unlike = {"term", "deadline_seconds", "protocol"}
        if request.model_dump(exclude=unlike) == old.request.model_dump(exclude=unlike):
            return Accepted(session)
        return _refuse("EpochDiffers", f"epoch {request.epoch} was joined with other ranks, key or addresses")
    if request.epoch <= session.last_epoch:
        return _refuse(
            "OlderEpoch", f"epoch {request.epoch} is over: epoch {session.last_epoch} came after it"
        )
    if session.round is not None and session.round.flipping:
        return _refuse("FlipRunning", f"version {session.round.version!r} is being made live; try again")
    if session.round is not None and session.round.held:
        # Bounded: without a decision the pod lets go of it, closed.
        return _refuse("Halted", f"round {session.round.round} is undecided here: commit or abort it first")
    if (wrong := _wrong_join(pod, request)) is not None:
        return wrong
    session, effects = _drop_epoch(session)
    epoch = Epoch(request, EpochPhase.JOINING, now + request.deadline_seconds, request.rendezvous)
    session = replace(session, epoch=epoch, last_epoch=request.epoch)
    if pod.lead:
        return Accepted(session, (*effects, OpenStore(request.epoch)))
    session, joins = _join_movers(session)
    return Accepted(session, effects + joins)


def _wrong_join(pod: Pod, request: JoinEpoch) -> Refused | None:
    stop = request.first_rank + pod.local_ranks
    if stop > request.world_size or request.trainer_ranks >= request.world_size:
        return _refuse(
            "BadRanks",
            f"ranks [{request.first_rank}, {stop}) and {request.trainer_ranks} trainer ranks do not fit "
            f"into a world of {request.world_size}",
        )
    if pod.role == "trainer":
        if (
            tuple(range(request.first_rank, stop)) != pod.trainer_ranks
            or request.trainer_ranks != pod.trainer_world
        ):
            return _refuse(
                "BadRanks",
                f"this pod holds trainer ranks {list(pod.trainer_ranks)} of {pod.trainer_world}, not "
                f"[{request.first_rank}, {stop}) of {request.trainer_ranks}",
            )
    elif request.first_rank < request.trainer_ranks:
        return _refuse("BadRanks", f"rank {request.first_rank} belongs to the trainer: workers come after it")
    if pod.lead:
        if request.rendezvous is not None:
            return _refuse("BadRendezvous", "this pod hosts rank 0 and opens the store itself")
        return None
    if request.rendezvous is None:
        return _refuse("BadRendezvous", "only the pod of rank 0 may join without the store's address")
    for place in (request.rendezvous, request.lead_agent):
        host = place.host.strip("[]").lower()
        loopback = host.startswith("127.") or host in ("::1", "localhost")
        if host in ("", "0.0.0.0", "::") or (loopback and not _is_loopback(pod.host)):
            return _refuse("BadRendezvous", f"{place.host!r} is no address of another pod")
    return None


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "localhost")


def _prepare(session: Session, request: Prepare, now: float) -> Answer:
    if (wrong := _wrong_epoch(session, request.epoch)) is not None:
        return wrong
    assert session.epoch is not None
    current = session.round
    if current is not None and request.round == current.round:
        if request.version == current.version:
            return Accepted(session)
        return _refuse("RoundDiffers", f"round {request.round} is of version {current.version!r}")
    if request.round <= max(session.epoch.round_floor, current.round if current else 0):
        return _refuse("OlderRound", f"round {request.round} is over")
    if session.epoch.phase is not EpochPhase.JOINED:
        return _refuse("EpochNotJoined", f"epoch {request.epoch} is {session.epoch.phase}")
    if current is not None and ORDER[RoundPhase.READY] < ORDER[current.phase] and current.phase not in FINAL:
        return _refuse("RoundRunning", f"round {current.round} is {current.phase}: commit or abort it first")
    if session.unsettled is not None:
        return _refuse("Unsettled", _not_settled(session.unsettled))
    session, effects = _let_go(session, GoOn())
    round_ = Round(
        request.epoch,
        request.round,
        request.version,
        RoundPhase.PREPARING,
        now + request.deadline_seconds,
        now + request.decide_by_seconds,
        request.sequence,
        request.flip,
    )
    over = max(session.over, (request.term, request.round - 1))
    if session.pod.in_place:
        # Before any rank begins: a scheduler that cannot stop in time is then nobody else's failure.
        hold = Hold(round_.epoch, round_.round, round_.flip, request.deadline_seconds / 2)
        session = replace(session, round=replace(round_, held=True), over=over)
        return Accepted(session, (*effects, hold))
    session, more = _check_ready(replace(session, round=round_, over=over))
    return Accepted(session, effects + more)


def _check_ready(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    """PREPARING -> READY once every local snapshot holds the version; FAILED once one holds a later one. In place it is
    the end of the hold that makes a pod ready."""
    round_ = session.round
    if round_ is None or round_.phase is not RoundPhase.PREPARING or session.pod.in_place:
        return session, ()
    if session.pod.role == "trainer":
        missing = _ranks_without(session, round_.version)
        held = session.published
        if held is not None and round_.sequence is not None and held.sequence > round_.sequence:
            return _fail_round(
                session,
                _problem(
                    "VersionUnavailable",
                    f"no snapshot of version {round_.version!r} any more: the trainer holds {held.version!r}",
                ),
            )
        if missing:
            return session, ()
    session = replace(session, round=replace(round_, phase=RoundPhase.READY, deadline=None))
    if session.pod.role == "inference":
        return session, ()
    taken = MoverOutcome(version=round_.version, committed=False, final=False)
    return session, (TellOutcome(tuple(range(session.pod.local_ranks)), taken),)


def _ranks_without(session: Session, version: str) -> list[int]:
    return [
        i
        for i in range(session.pod.local_ranks)
        if (s := session.movers.get(i)) is None or s.snapshot is None or s.snapshot.version != version
    ]


def _transfer(session: Session, request: Transfer, now: float) -> Answer:
    if (wrong := _wrong_round(session, request.epoch, request.round)) is not None:
        return wrong
    round_, epoch = session.round, session.epoch
    assert round_ is not None and epoch is not None
    if round_.phase is RoundPhase.PREPARING:
        return _refuse("NotReady", f"round {round_.round} is still being prepared here")
    if round_.phase is RoundPhase.ABORTED:
        return _refuse("RoundAborted", f"round {round_.round} was aborted")
    if round_.phase is not RoundPhase.READY:
        return Accepted(session)
    if epoch.phase is not EpochPhase.JOINED:
        return _refuse("EpochFailed", f"epoch {request.epoch} is {epoch.phase}")
    if session.pod.in_place and not round_.held:
        return _refuse("NotReady", f"the scheduler does not stand still for round {round_.round} any more")
    message = MoverTransfer(
        epoch=request.epoch,
        round=request.round,
        version=round_.version,
        deadline_seconds=request.deadline_seconds,
    )
    stands = dict.fromkeys(range(session.pod.local_ranks), (0, now))
    round_ = replace(
        round_, phase=RoundPhase.TRANSFERRING, deadline=now + request.deadline_seconds, stands=stands
    )
    effects = tuple(StartTransfer(i, message) for i in range(session.pod.local_ranks))
    return Accepted(replace(session, round=round_), effects)


def _halt(session: Session, request: Halt, now: float) -> Answer:
    if session.pod.role != "inference":
        return _refuse("WrongRole", "a trainer pod generates nothing and cannot be halted")
    mark, known = (request.term, request.round), session.halt
    if mark <= session.over or (known is not None and mark < known.number):
        return _refuse("OlderRound", f"round {request.round} is over")
    if known is not None and known.number == mark and known.step != "failed":
        return Accepted(session)
    round_ = session.round
    if round_ is not None and (round_.epoch, round_.round) == (request.epoch, request.round):
        if round_.phase in FINAL:
            return _refuse("RoundOver", f"round {request.round} is {round_.phase} here")
        if round_.phase is RoundPhase.COMMITTING:
            return Accepted(session)
        if round_.phase is not RoundPhase.VERIFIED:
            return _refuse("NotVerified", f"round {request.round} is {round_.phase} here")
        limit = now + request.deadline_seconds
        decide_by = None if round_.decide_by is None else min(round_.decide_by, limit)
        halt = HaltMark(request.term, request.epoch, request.round)
        if round_.held:
            # In place it has stood still since before the transfer.
            round_ = replace(round_, decide_by=decide_by)
            return Accepted(replace(session, round=round_, halt=replace(halt, step="done")))
        round_ = replace(round_, held=True, decide_by=decide_by)
        session = replace(session, round=round_, halt=halt)
        hold = Hold(round_.epoch, round_.round, round_.flip, request.deadline_seconds / 2)
        return Accepted(session, (hold,))
    session, closed = _close(session, f"round {request.round} goes live without this pod; it comes after it")
    session, _ = _let_go(session, EndRequests())
    session = replace(session, halt=HaltMark(request.term, request.epoch, request.round))
    return Accepted(session, (*closed, EndRequests(mark)))


def _no_longer_halted(session: Session, round_: Round) -> Session:
    """This round is over here."""
    halt = session.halt
    if halt is None or (halt.epoch, halt.round) != (round_.epoch, round_.round):
        return session
    return replace(session, halt=None)


def _let_go(
    session: Session, how: GoOn | EndRequests, problem: Problem | None = None
) -> tuple[Session, tuple[Effect, ...]]:
    """Of the scheduler that is held for the present round, if it is. One that stands still for a transfer in place goes
    on only once it is known what is live."""
    if isinstance(how, GoOn) and _written(session):
        return _unsettle(session, problem), ()
    round_ = session.round
    if round_ is None or not round_.held:
        return session, ()
    if isinstance(how, EndRequests) and session.halt is not None:
        how = EndRequests(session.halt.number)
    return replace(session, round=replace(round_, held=False)), (how,)


def _written(session: Session) -> bool:
    """Whether the live weights were given to movers for a round that is not over."""
    round_ = session.round
    return (
        session.pod.in_place
        and round_ is not None
        and ORDER[RoundPhase.TRANSFERRING] <= ORDER[round_.phase] < ORDER[RoundPhase.COMMITTED]
    )


def _in_flux(session: Session) -> bool:
    """Whether what the workers say of the live weights is to be expected and means nothing: a transfer in place runs,
    or waits for its decision or its flip, or failed a moment ago."""
    round_ = session.round
    if session.unsettled is not None:
        return True
    return (
        _written(session)
        and round_ is not None
        and (round_.phase is not RoundPhase.COMMITTING or round_.flipping)
    )


def _unsettle(session: Session, problem: Problem | None = None) -> Session:
    """The round that movers wrote to the live weights for ends otherwise than by going live."""
    round_, epoch = session.round, session.epoch
    assert round_ is not None
    movers: frozenset[str] = frozenset()
    if round_.phase is RoundPhase.TRANSFERRING and epoch is not None:
        movers = frozenset(epoch.joined.values())
    left = Unsettled(round_.epoch, round_.round, movers, round_.held, problem or round_.problem)
    return replace(session, unsettled=left, round=replace(round_, held=False))


def _not_settled(left: Unsettled) -> str:
    return f"round {left.round} failed in the middle of writing to the live weights; what is live is being looked at"


def _settle(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
    """Ask what is live as soon as nobody writes to it any more."""
    left = session.unsettled
    if left is None or left.asked:
        return session, ()
    if left.deadline is None:
        left = replace(left, deadline=now + SETTLE_SECONDS)
    left = replace(left, movers=frozenset(mover for mover in left.movers if _writes(session, left, mover)))
    if left.movers:
        return replace(session, unsettled=left), ()
    return replace(session, unsettled=replace(left, asked=True)), (AskLive(left.epoch, left.round),)


def _writes(session: Session, left: Unsettled, mover_id: str) -> bool:
    """Whether this mover may still write: it is not gone, and has not said of this round that it is over."""
    if mover_id in session.condemned:
        return True
    state = next((s for s in session.movers.values() if s.mover_id == mover_id), None)
    if state is None:
        return False
    over = (
        state.round is not None
        and (state.round.epoch, state.round.round) == (left.epoch, left.round)
        and state.round.phase is not RoundPhase.TRANSFERRING
    )
    # One whose epoch failed may report a round that its own thread has not ended.
    return not over or state.epoch is None or state.epoch.phase is not EpochPhase.JOINED


def _settled(session: Session, event: Settled) -> tuple[Session, tuple[Effect, ...]]:
    left = session.unsettled
    if left is None or not left.asked or (left.epoch, left.round) != (event.epoch, event.round):
        return session, ()
    session, effects = _live(replace(session, unsettled=None), event.live, event.torn, left.problem)
    if not left.held:
        return session, effects
    return session, (*effects, EndRequests() if event.torn else GoOn())


def _commit(session: Session, request: Commit) -> Answer:
    round_ = session.round
    known = round_ is not None and (round_.epoch, round_.round) == (request.epoch, request.round)
    if known:
        assert round_ is not None
        if request.version != round_.version:
            return _refuse("RoundDiffers", f"round {request.round} is of version {round_.version!r}")
        if round_.phase is RoundPhase.COMMITTED or round_.flipping:
            return Accepted(session)
        if round_.phase in (RoundPhase.VERIFIED, RoundPhase.COMMITTING):
            return Accepted(*_committed(session, request.deadline_seconds))
    elif _restarted_since(session, request):
        return Accepted(*_mirror_past(session, request))
    elif request.epoch < session.last_epoch:
        return _refuse("OlderEpoch", f"epoch {request.epoch} is over")
    elif round_ is not None and round_.epoch == request.epoch and request.round < round_.round:
        return _refuse("OlderRound", f"round {request.round} is over")
    if session.pod.role == "inference":
        if not session.live_known:
            return _refuse("NotReady", "the workers have not said yet which version they hold; try again")
        if session.unsettled is not None:
            return _refuse("Unsettled", _not_settled(session.unsettled))
        if session.live == request.version and not session.torn and not _in_flux(session):
            # This agent restarted after the flip: the workers are the truth.
            done = Round(request.epoch, request.round, request.version, RoundPhase.COMMITTED, None, None)
            if known or session.epoch is None:
                session = replace(session, round=done)
            return Accepted(session)
    if known:
        assert round_ is not None
        return _refuse(
            "NotVerified", f"round {request.round} is {round_.phase} here: nothing verified to commit"
        )
    return _refuse("UnknownRound", f"this agent knows no round {request.round} of epoch {request.epoch}")


def _committed(session: Session, flip_seconds: float) -> tuple[Session, tuple[Effect, ...]]:
    """The decision is known, and this pod is verified: act on it."""
    round_ = session.round
    assert round_ is not None and session.object_uid is not None
    if session.pod.role == "trainer":
        return _mirror(replace(session, round=replace(round_, phase=RoundPhase.COMMITTED, decide_by=None)))
    round_ = replace(round_, phase=RoundPhase.COMMITTING, flipping=True, decide_by=None, asking=False)
    flip = Flip(session.object_uid, round_.epoch, round_.round, round_.version, flip_seconds, round_.flip)
    return replace(session, round=round_), (flip,)


def _mirror(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    assert session.round is not None
    session = replace(session, committed=session.round.version)
    return _remember(session, "committed"), _tell(session, all_ranks=True)


def _restarted_since(session: Session, request: Commit) -> bool:
    """A trainer's agent that knows of no decision, asked to commit what was decided before it began."""
    if session.pod.role != "trainer" or session.committed is not None:
        return False
    return request.epoch < session.last_epoch or (session.epoch is None and session.round is None)


def _mirror_past(session: Session, request: Commit) -> tuple[Session, tuple[Effect, ...]]:
    """Mirror such a decision, for the handles and for pods that ask; an epoch that was joined since goes on."""
    done = Round(request.epoch, request.round, request.version, RoundPhase.COMMITTED, None, None)
    mirrored, effects = _mirror(replace(session, round=done))
    if session.epoch is None and session.round is None:
        return mirrored, effects
    return replace(mirrored, round=session.round), effects


def _remember(session: Session, verdict: Verdict) -> Session:
    round_ = session.round
    assert round_ is not None and session.object_uid is not None
    key = session.epoch.request.key if session.epoch and session.epoch.request.epoch == round_.epoch else ""
    decided = Decided(session.object_uid, round_.epoch, round_.round, verdict, key)
    return replace(session, decisions=(*session.decisions, decided)[-REMEMBERED_DECISIONS:])


def _tell(
    session: Session, *, all_ranks: bool = False, only: int | None = None, final: bool = False
) -> tuple[Effect, ...]:
    """Trainer: hand the outcome of the newest round to the training processes."""
    round_ = session.round
    if session.pod.role != "trainer" or round_ is None or round_.phase not in FINAL:
        return ()
    committed = round_.phase is RoundPhase.COMMITTED
    message = MoverOutcome(
        version=round_.version, committed=committed, problem=round_.problem, final=committed or final
    )
    ranks = tuple(range(session.pod.local_ranks)) if all_ranks else (only,) if only is not None else ()
    return (TellOutcome(ranks, message),)


def _tell_committed(session: Session, local_rank: int) -> tuple[Effect, ...]:
    """To a mover that connects: its training process may not have heard of the last commit."""
    if session.pod.role != "trainer" or session.committed is None:
        return ()
    return (TellOutcome((local_rank,), MoverOutcome(version=session.committed, committed=True)),)


def _abort(session: Session, request: Abort) -> Answer:
    if (wrong := _wrong_epoch(session, request.epoch)) is not None:
        return wrong
    round_, epoch = session.round, session.epoch
    assert epoch is not None
    if round_ is None or request.round > round_.round:
        if round_ is not None and round_.phase not in FINAL and ORDER[round_.phase] > ORDER[RoundPhase.READY]:
            return _refuse(
                "RoundRunning", f"round {round_.round} is {round_.phase}: commit or abort it first"
            )
        epoch = replace(epoch, round_floor=max(epoch.round_floor, request.round))
        return Accepted(replace(session, epoch=epoch))
    if request.round < round_.round:
        return _refuse("OlderRound", f"round {request.round} is over")
    if round_.phase in (RoundPhase.COMMITTING, RoundPhase.COMMITTED):
        return _refuse(
            "AlreadyCommitted", f"round {request.round} is {round_.phase}: a decision is never undone"
        )
    if round_.phase in FINAL:
        return Accepted(session, _tell(session, all_ranks=True, final=request.final) if request.final else ())
    effects: tuple[Effect, ...] = ()
    if round_.phase is RoundPhase.TRANSFERRING:
        session, effects = _kill(session, tuple(session.movers), f"round {round_.round} was aborted")
        session = _fail_epoch_only(session, request.problem)
    session, go_on = _let_go(session, GoOn(), request.problem)
    session = replace(session, round=_ended(round_, RoundPhase.ABORTED, request.problem))
    session = _remember(_no_longer_halted(session, round_), "aborted")
    return Accepted(session, effects + go_on + _tell(session, all_ranks=True, final=request.final))


def _ended(round_: Round, phase: RoundPhase, problem: Problem | None) -> Round:
    return replace(
        round_,
        phase=phase,
        problem=problem,
        deadline=None,
        decide_by=None,
        asking=False,
        fenced=False,
        flipping=False,
        held=False,
    )


def _admit(session: Session, request: Admit) -> Answer:
    if session.pod.role != "inference":
        return _refuse("WrongRole", "a trainer pod serves nothing and cannot be admitted")
    if not session.live_known:
        return _refuse("NotReady", "the workers have not said yet which version they hold; try again")
    if session.torn:
        return _refuse("Torn", f"{TORN}: a whole round must succeed first")
    round_ = session.round
    if session.halt is not None and (request.term, request.after) < session.halt.number:
        return _refuse("Halted", f"halted for round {session.halt.round}, which is not over")
    if session.unsettled is not None:
        return _refuse("Unsettled", _not_settled(session.unsettled))
    if round_ is not None and (round_.fenced or round_.held or _in_flux(session)):
        return _refuse(
            "Undecided",
            f"round {round_.round} is {round_.phase} and undecided here: commit or abort it first",
        )
    if round_ is not None and round_.phase is RoundPhase.COMMITTING:
        return _refuse("Committing", f"version {round_.version!r} is being made live: admit it afterwards")
    if session.live != request.version:
        return _refuse("NotLive", f"{_named(session.live)} is live here, not {_named(request.version)}")
    session = replace(session, over=max(session.over, (request.term, request.after)), halt=None)
    if session.guard.open and session.guard.admitted == request.version:
        return Accepted(session)
    session = replace(session, guard=Guard(True, request.version, ""))
    return Accepted(session, (OpenGuard(request.version),))


def _named(version: str | None) -> str:
    return "the weights loaded at start" if version is None else f"version {version!r}"


def _leave(session: Session, request: Leave) -> Answer:
    if request.epoch < session.last_epoch:
        return _refuse(
            "OlderEpoch", f"epoch {request.epoch} is over: epoch {session.last_epoch} came after it"
        )
    if session.round is not None and session.round.flipping:
        return _refuse("FlipRunning", f"version {session.round.version!r} is being made live; try again")
    session, effects = _drop_epoch(session)
    return Accepted(replace(session, last_epoch=request.epoch), effects)


def _wrong_epoch(session: Session, epoch: int) -> Refused | None:
    if session.epoch is not None and session.epoch.request.epoch == epoch:
        return None
    if epoch <= session.last_epoch:
        return _refuse("OlderEpoch", f"epoch {epoch} is over here")
    return _refuse("UnknownEpoch", f"this agent has not joined epoch {epoch}")


def _wrong_round(session: Session, epoch: int, round_: int) -> Refused | None:
    if (wrong := _wrong_epoch(session, epoch)) is not None:
        return wrong
    assert session.epoch is not None
    current = session.round
    if current is not None and current.round == round_:
        return None
    if round_ <= max(session.epoch.round_floor, current.round if current else 0):
        return _refuse("OlderRound", f"round {round_} is over")
    return _refuse("UnknownRound", f"round {round_} was not prepared here")


# ---- epochs and movers -------------------------------------------------------------------------------------


def _drop_epoch(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    epoch = session.epoch
    # Also without an epoch: the movers may still be in one that a former agent process led.
    unclean = tuple(i for i in session.movers if not _clean(session, i))
    session, effects = _kill(session, unclean, "another epoch begins, or this one is over")
    session, go_on = _let_go(session, GoOn())
    effects += go_on
    if go_on or session.unsettled is not None:
        session = replace(session, halt=None)
    if epoch is not None:
        if session.movers:
            effects = (*effects, LeaveMovers(epoch.request.epoch))
        if session.pod.lead:
            effects = (*effects, CloseStore(epoch.request.epoch))
    return replace(session, epoch=None, round=None), effects


def _clean(session: Session, local_rank: int) -> bool:
    """Whether a mover can be told to join anew: it is in no collective, and its last epoch did not fail, or only
    before it had a communicator."""
    state, epoch = session.movers[local_rank], session.epoch
    if epoch is not None and epoch.joined.get(local_rank) == state.mover_id:
        mine = state.epoch is not None and state.epoch.epoch == epoch.request.epoch
        running = session.round is not None and session.round.phase is RoundPhase.TRANSFERRING
        if not mine or running:
            return False
    if state.round is not None and state.round.phase is RoundPhase.TRANSFERRING:
        return False
    return state.epoch is None or state.epoch.phase is EpochPhase.JOINED or state.epoch.reusable


def _kill(session: Session, ranks: tuple[int, ...], why: str) -> tuple[Session, tuple[Effect, ...]]:
    victims = tuple((i, session.movers[i].mover_id) for i in ranks if i in session.movers)
    if not victims:
        return session, ()
    movers = {i: s for i, s in session.movers.items() if i not in ranks}
    condemned = session.condemned | {mover_id for _, mover_id in victims}
    return replace(session, movers=movers, condemned=condemned), (KillMovers(victims, why),)


def _entangled(session: Session) -> tuple[int, ...]:
    """The movers that hold, or wait for, a communicator that will never be whole, which none could leave by itself; and
    those that were told to join and have not said a word of it. Those that only wait in the store stay: else a deadline
    that is shorter than the start of a mover would never be met, as each attempt would end the movers of all pods.
    """
    joined = session.epoch.joined if session.epoch is not None else {}
    return tuple(
        i
        for i, s in session.movers.items()
        if (s.epoch is not None and not s.epoch.reusable) or (s.epoch is None and joined.get(i) == s.mover_id)
    )


def _join_movers(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    """Tell every connected mover that was not told yet, as soon as the store's address is known."""
    epoch = session.epoch
    if epoch is None or epoch.phase is not EpochPhase.JOINING or epoch.rendezvous is None:
        return session, ()
    request, pod = epoch.request, session.pod
    effects: list[Effect] = []
    joined = dict(epoch.joined)
    for local_rank, state in sorted(session.movers.items()):
        if local_rank in joined or local_rank >= pod.local_ranks:
            continue
        joined[local_rank] = state.mover_id
        message = MoverJoin(
            object_uid=request.object_uid,
            term=request.term,
            epoch=request.epoch,
            rank=request.first_rank + local_rank,
            world_size=request.world_size,
            trainer_ranks=request.trainer_ranks,
            rendezvous=epoch.rendezvous,
            key=request.key,
            host=pod.host,
            transport=request.transport,
            server=pod.uid or pod.name,
            who=_who(pod, local_rank),
            deadline_seconds=request.deadline_seconds,
        )
        effects.append(JoinMover(local_rank, message))
    return replace(session, epoch=replace(epoch, joined=joined)), tuple(effects)


def _fail_epoch_only(session: Session, problem: Problem) -> Session:
    epoch = session.epoch
    if epoch is None or epoch.phase is EpochPhase.FAILED:
        return session
    return replace(session, epoch=replace(epoch, phase=EpochPhase.FAILED, problem=problem))


def _fail_epoch(session: Session, problem: Problem) -> tuple[Session, tuple[Effect, ...]]:
    """The communicator is lost. A verified round stays: its bytes are in the shadow and may be committed."""
    session = _fail_epoch_only(session, problem)
    return _fail_round(session, problem)


def _fail_round(session: Session, problem: Problem) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or ORDER[round_.phase] >= ORDER[RoundPhase.VERIFIED]:
        return session, ()
    session, go_on = _let_go(session, GoOn(), problem)
    session = replace(session, round=_ended(round_, RoundPhase.FAILED, problem))
    return session, go_on + _tell(session, all_ranks=True)


# ---- events ------------------------------------------------------------------------------------------------


def observe(session: Session, event: Event, now: float) -> tuple[Session, tuple[Effect, ...]]:
    """Take in what happened. Events of things that are over change nothing."""
    session, effects = _observe(session, event, now)
    session, more = _settle(session, now)
    return session, effects + more


def _observe(session: Session, event: Event, now: float) -> tuple[Session, tuple[Effect, ...]]:
    match event:
        case MoverReported():
            session, effects = _mover_reported(session, event)
            return _note_progress(session, event.local_rank, now), effects
        case MoverLost():
            return _mover_lost(session, event)
        case StoreOpened(epoch, rendezvous):
            if session.epoch is None or session.epoch.request.epoch != epoch:
                return session, (CloseStore(epoch),)
            return _join_movers(replace(session, epoch=replace(session.epoch, rendezvous=rendezvous)))
        case StoreFailed(epoch, problem):
            if session.epoch is None or session.epoch.request.epoch != epoch:
                return session, ()
            return _fail_epoch(session, problem)
        case FlipEnded():
            return _flip_ended(session, event)
        case HoldEnded():
            return _hold_ended(session, event)
        case RequestsEnded():
            return _requests_ended(session, event)
        case LiveObserved(live, torn):
            return (session, ()) if _in_flux(session) else _live(session, live, torn)
        case Settled():
            return _settled(session, event)
        case DecisionLearnt():
            return _decision_learnt(session, event, now)
        case TimePassed():
            return _time_passed(session, now)


def _mover_reported(session: Session, event: MoverReported) -> tuple[Session, tuple[Effect, ...]]:
    state, local_rank = event.state, event.local_rank
    if state.mover_id in session.condemned or local_rank >= session.pod.local_ranks:
        return session, ()
    before = session.movers.get(local_rank)
    effects: tuple[Effect, ...] = ()
    if before is not None and before.mover_id != state.mover_id:
        session, effects = _mover_lost(session, MoverLost(local_rank, before.mover_id))
    session = replace(session, movers={**session.movers, local_rank: state})
    if before is None or before.mover_id != state.mover_id:
        effects += _tell(session, only=local_rank) or _tell_committed(session, local_rank)
    for step in (_see_published, _join_movers, _see_epoch, _check_ready, _see_round):
        session, more = step(session)
        effects += more
    return session, effects


def _see_published(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    """The newest version that all local ranks hold; in the middle of a publish, the one before."""
    if session.pod.role != "trainer" or len(session.movers) < session.pod.local_ranks:
        return session, ()
    held = {s.snapshot for s in session.movers.values()}
    if len(held) == 1 and (one := next(iter(held))) is not None and one != session.published:
        return replace(session, published=one), ()
    return session, ()


def _see_epoch(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    epoch = session.epoch
    if epoch is None or epoch.phase is EpochPhase.FAILED:
        return session, ()
    plan, done = epoch.plan, 0
    for local_rank, mover_id in epoch.joined.items():
        state = session.movers.get(local_rank)
        if state is None or state.mover_id != mover_id or state.epoch is None:
            continue
        if (state.epoch.object_uid, state.epoch.epoch) != (epoch.request.object_uid, epoch.request.epoch):
            continue
        if state.epoch.phase is EpochPhase.FAILED:
            problem = state.epoch.problem or _problem(
                "MoverFailed", "the mover gave no reason", epoch.request.first_rank + local_rank
            )
            session, effects = _kill(session, _entangled(session), f"epoch failed: {problem.reason}")
            session, more = _fail_epoch(session, problem)
            return session, effects + more
        if state.epoch.phase is EpochPhase.JOINED:
            done += 1
            plan = state.epoch.plan or plan
    if done == session.pod.local_ranks and epoch.phase is EpochPhase.JOINING:
        return replace(session, epoch=replace(epoch, phase=EpochPhase.JOINED, plan=plan)), ()
    return session, ()


def _see_round(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or round_.phase is not RoundPhase.TRANSFERRING:
        return session, ()
    mine = [
        s.round
        for s in session.movers.values()
        if s.round is not None and (s.round.epoch, s.round.round) == (round_.epoch, round_.round)
    ]
    round_ = replace(
        round_, bytes_done=sum(r.bytes_done for r in mine), bytes_total=sum(r.bytes_total for r in mine)
    )
    session = replace(session, round=round_)
    for r in mine:
        if r.phase is RoundPhase.FAILED:
            return _fail_round(session, r.problem or _problem("TransferFailed", "the mover gave no reason"))
    if len(mine) == session.pod.local_ranks and all(r.phase is RoundPhase.VERIFIED for r in mine):
        seconds = max((r.seconds for r in mine if r.seconds is not None), default=None)
        content = next((r.content for r in mine if r.content), "")
        round_ = replace(round_, phase=RoundPhase.VERIFIED, deadline=None, seconds=seconds, content=content)
        return replace(session, round=round_), ()
    return session, ()


def _mover_lost(session: Session, event: MoverLost) -> tuple[Session, tuple[Effect, ...]]:
    state = session.movers.get(event.local_rank)
    if state is not None and state.mover_id == event.mover_id:
        session = replace(session, movers={i: s for i, s in session.movers.items() if i != event.local_rank})
    session = replace(session, condemned=session.condemned - {event.mover_id})
    epoch = session.epoch
    if (
        epoch is None
        or epoch.phase is EpochPhase.FAILED
        or epoch.joined.get(event.local_rank) != event.mover_id
    ):
        return session, ()
    rank = epoch.request.first_rank + event.local_rank
    problem = _problem("MoverLost", f"the mover of rank {rank} (pod {session.pod.name}) is gone", rank)
    effects: tuple[Effect, ...] = ()
    if session.round is not None and session.round.phase is RoundPhase.TRANSFERRING:
        session, effects = _kill(session, tuple(session.movers), problem.message)
    session, more = _fail_epoch(session, problem)
    return session, effects + more


def _flip_ended(session: Session, event: FlipEnded) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    mine = (
        round_ is not None and (round_.epoch, round_.round) == (event.epoch, event.round) and round_.flipping
    )
    if not mine:
        return (session, ()) if _in_flux(session) else _live(session, event.live, event.torn)
    assert round_ is not None
    if event.live == round_.version and not event.torn:
        # Of a flip that failed after the weights were live, the server leaves a held scheduler held.
        go_on = (GoOn(),) if round_.held and event.problem is not None else ()
        session = replace(
            _no_longer_halted(session, round_),
            live=event.live,
            torn=False,
            live_known=True,
            over=max(session.over, (session.term, round_.round)),
            round=_ended(round_, RoundPhase.COMMITTED, None),
        )
        if session.guard.open:
            # In sync before the flip, in sync after it: serving never stops.
            session = replace(session, guard=Guard(True, round_.version, ""))
            return session, go_on
        because = f"version {round_.version!r} is live; waiting for the operator to admit it"
        return replace(session, guard=Guard(False, None, because)), (CloseGuard(because), *go_on)
    problem = event.problem or _problem("FlipFailed", f"the workers hold {_named(event.live)} after the flip")
    session = replace(session, round=replace(round_, flipping=False, problem=problem))
    session, effects = _live(session, event.live, event.torn)
    session, closed = _close(
        session, f"version {round_.version!r} was decided but is not live: {problem.message}"
    )
    # Nowhere else are the old weights in use any more.
    session, end = _let_go(session, EndRequests())
    return session, effects + closed + end


def _hold_ended(session: Session, event: HoldEnded) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or (round_.epoch, round_.round) != (event.epoch, event.round) or not round_.held:
        return session, (GoOn(),) if event.problem is None else ()
    if round_.phase is RoundPhase.PREPARING:
        return _stands_still(session, round_, event.problem)
    halt = session.halt
    if event.problem is None:
        if halt is not None and (halt.epoch, halt.round) == (event.epoch, event.round):
            session = replace(session, halt=replace(halt, step="done"))
        return session, ()
    if round_.phase is not RoundPhase.VERIFIED:
        return session, ()  # committing by now: the flip stops the scheduler itself
    session, _ = _let_go(replace(session, round=replace(round_, held=False)), GoOn(), event.problem)
    session = replace(session, round=_ended(round_, RoundPhase.FAILED, event.problem))
    return _no_longer_halted(session, round_), ()


def _stands_still(
    session: Session, round_: Round, problem: Problem | None
) -> tuple[Session, tuple[Effect, ...]]:
    """In place: the scheduler stands still, so the transfer may begin; or it goes on as before."""
    if problem is not None:
        session = replace(session, round=replace(round_, held=False))
        return _fail_round(session, problem)
    deadline = None if round_.deadline is None else round_.deadline + STANDING_SECONDS
    return replace(session, round=replace(round_, phase=RoundPhase.READY, deadline=deadline)), ()


def _requests_ended(session: Session, event: RequestsEnded) -> tuple[Session, tuple[Effect, ...]]:
    if session.halt is None or session.halt.number != event.mark:
        return session, ()
    step: Literal["done", "failed"] = "failed" if event.problem else "done"
    return replace(session, halt=replace(session.halt, step=step)), ()


def _live(
    session: Session, live: str | None, torn: bool, problem: Problem | None = None
) -> tuple[Session, tuple[Effect, ...]]:
    session = replace(session, live=live, torn=torn, live_known=True)
    if torn and not session.guard.open and problem is None and session.guard.because.startswith(TORN):
        return session, ()  # the first account has the cause
    if torn:
        why = f" ({problem.reason}: {problem.message})" if problem is not None else ""
        return _close(session, f"{TORN}: a whole round must succeed first{why}")
    flipping = session.round is not None and session.round.flipping
    if session.guard.open and session.guard.admitted != live and not flipping:
        return _close(session, f"{_named(live)} became live outside of any round")
    return session, ()


def _close(session: Session, because: str) -> tuple[Session, tuple[Effect, ...]]:
    because = _clip(because)
    if not session.guard.open and session.guard.because == because:
        return session, ()
    return replace(session, guard=Guard(False, None, because)), (CloseGuard(because),)


def _decision_learnt(
    session: Session, event: DecisionLearnt, now: float
) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or (round_.epoch, round_.round) != (event.epoch, event.round) or not round_.asking:
        return session, ()
    if event.verdict == "committed":
        return _committed(session, LEARNT_FLIP_SECONDS)
    if event.verdict == "aborted":
        problem = _problem("Aborted", "the trainer's agent says that the round was aborted")
        was_fenced = round_.fenced
        session, go_on = _let_go(session, GoOn(), problem)
        session = replace(session, round=_ended(round_, RoundPhase.ABORTED, problem))
        session = _no_longer_halted(session, round_)
        if not was_fenced:
            return session, go_on
        return _close(session, "the round was aborted; waiting for the operator to admit this pod again")
    round_ = replace(round_, asking=False, fenced=True, decide_by=now + ASK_AGAIN_SECONDS)
    session, closed = _close(
        replace(session, round=round_),
        f"version {round_.version!r} is verified and nobody says whether it was committed",
    )
    session, end = _let_go(session, EndRequests())
    return session, closed + end


def _time_passed(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
    session, effects = _unsettled_too_long(session, now)
    epoch = session.epoch
    if epoch is not None and epoch.phase is EpochPhase.JOINING and now >= epoch.deadline:
        late = _late_joiners(session)
        session, kills = _kill(session, _entangled(session), "the epoch's deadline passed")
        session, more = _fail_epoch(session, late)
        effects += kills + more
    round_ = session.round
    if round_ is None or round_.phase in FINAL:
        return session, effects
    due = round_.deadline is not None and now >= round_.deadline
    if session.pod.in_place and round_.phase in (RoundPhase.PREPARING, RoundPhase.READY) and due:
        session, more = _fail_round(session, _stood_in_vain(session))
        return session, effects + more
    if round_.phase is RoundPhase.PREPARING and due:
        ranks = [session.pod.trainer_ranks[i] for i in _ranks_without(session, round_.version)]
        problem = _problem(
            "PrepareTimeout",
            f"trainer ranks {ranks} of pod {session.pod.name} did not publish {round_.version!r} in time",
            ranks[0] if ranks else None,
        )
        session, more = _fail_round(session, problem)
        return session, effects + more
    if round_.phase is RoundPhase.TRANSFERRING and round_.deadline is not None and now >= round_.deadline:
        problem = _late_movers(session, now)
        session, kills = _kill(session, tuple(session.movers), problem.message)
        session, more = _fail_epoch(session, problem)
        return session, effects + kills + more
    if round_.decide_by is None or now < round_.decide_by:
        return session, effects
    if round_.phase in (RoundPhase.PREPARING, RoundPhase.READY):
        session, more = _fail_round(session, _problem("NoTransfer", "no transfer was asked for in time"))
        return session, effects + more
    if round_.phase is RoundPhase.VERIFIED and session.pod.role == "inference" and not round_.asking:
        if epoch is None or session.object_uid is None:
            return session, effects
        request = epoch.request
        ask = AskDecision(request.lead_agent, session.object_uid, round_.epoch, round_.round, request.key)
        return replace(session, round=replace(round_, asking=True, decide_by=None)), (*effects, ask)
    if round_.phase is RoundPhase.VERIFIED and session.pod.role == "trainer":
        # A trainer pod serves nothing: it goes on waiting for the word, at no cost to anybody.
        return replace(session, round=replace(round_, decide_by=None)), effects
    return session, effects


def _unsettled_too_long(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
    """Movers that do not end, or workers that do not answer: taken for torn. What is live is asked all the same."""
    left = session.unsettled
    if left is None or left.deadline is None or now < left.deadline:
        return session, ()
    stuck = tuple(i for i, s in session.movers.items() if s.mover_id in left.movers)
    session, effects = _kill(
        session, stuck, f"round {left.round} failed, and they go on writing to the live weights"
    )
    session, closed = _live(session, session.live, True, left.problem)
    held = (EndRequests(),) if left.held else ()
    left = replace(left, held=False, deadline=float("inf"))
    return replace(session, unsettled=left), effects + closed + held


def _stood_in_vain(session: Session) -> Problem:
    round_, pod = session.round, session.pod
    assert round_ is not None
    if round_.phase is RoundPhase.READY:
        return _problem(
            "NoTransfer", f"pod {pod.name} stood still for a transfer that was not asked for in time"
        )
    return _problem("HaltTimeout", f"the scheduler of pod {pod.name} did not stand still in time")


def _late_joiners(session: Session) -> Problem:
    epoch, pod = session.epoch, session.pod
    assert epoch is not None
    first = epoch.request.first_rank
    if epoch.rendezvous is None:
        return _problem(
            "JoinTimeout", f"the store of epoch {epoch.request.epoch} did not open in pod {pod.name}", first
        )
    absent = [first + i for i in range(pod.local_ranks) if i not in epoch.joined]
    if absent:
        return _problem("JoinTimeout", f"ranks {absent} of pod {pod.name} have no mover", absent[0])
    return _problem(
        "JoinTimeout",
        f"ranks [{first}, {first + pod.local_ranks}) of pod {pod.name} waited for their peers of epoch "
        f"{epoch.request.epoch} in vain",
    )


def _note_progress(session: Session, local_rank: int, now: float) -> Session:
    """Since when a mover stands where it stands, for the words of a timeout."""
    round_, state = session.round, session.movers.get(local_rank)
    if round_ is None or round_.phase is not RoundPhase.TRANSFERRING or state is None:
        return session
    theirs = state.round
    if theirs is None or (theirs.epoch, theirs.round) != (round_.epoch, round_.round):
        return session
    if round_.stands.get(local_rank, (-1, 0.0))[0] == theirs.step:
        return session
    stands = {**round_.stands, local_rank: (theirs.step, now)}
    return replace(session, round=replace(round_, stands=stands))


def _late_movers(session: Session, now: float) -> Problem:
    round_, epoch = session.round, session.epoch
    assert round_ is not None and epoch is not None
    late = []
    for i in range(session.pod.local_ranks):
        rank = f"rank {epoch.request.first_rank + i} ({_who(session.pod, i)})"
        waited = f"for {now - round_.stands.get(i, (0, now))[1]:.0f} s"
        r = session.movers[i].round if i in session.movers else None
        if r is None or (r.epoch, r.round) != (round_.epoch, round_.round):
            late.append(f"{rank} has not begun {waited}")
        elif r.phase is RoundPhase.VERIFIED:
            continue
        elif r.step < r.steps:
            late.append(f"{rank} has not finished step {r.step + 1} of {r.steps} {waited}")
        else:
            late.append(f"{rank} has done all {r.steps} steps and waited for the verdict {waited}")
    return _problem(
        "TransferTimeout",
        f"version {round_.version!r} did not arrive in time: {', '.join(late)}; a mover that stands still is "
        "frozen, starved or cut off, and is replaced now",
    )


def _who(pod: Pod, local_rank: int) -> str:
    """A rank in words: its pod, and which of several it is there."""
    if pod.role == "trainer":
        return f"pod {pod.name}"
    return f"pod {pod.name}, worker {local_rank}"


# ---- reading -----------------------------------------------------------------------------------------------


def next_deadline(session: Session) -> float | None:
    """When `TimePassed` is due next."""
    times: list[float] = []
    left = session.unsettled
    if left is not None and left.deadline is not None and left.deadline < float("inf"):
        times.append(left.deadline)
    if session.epoch is not None and session.epoch.phase is EpochPhase.JOINING:
        times.append(session.epoch.deadline)
    round_ = session.round
    if round_ is not None and round_.phase not in FINAL and round_.phase is not RoundPhase.COMMITTING:
        if round_.deadline is not None and ORDER[round_.phase] <= ORDER[RoundPhase.TRANSFERRING]:
            times.append(round_.deadline)
        if round_.decide_by is not None and round_.phase is not RoundPhase.TRANSFERRING:
            times.append(round_.decide_by)
    return min(times, default=None)


def agent_state(session: Session, revision: int, problem: Problem | None = None) -> AgentState:
    """What the operator reads."""
    pod, epoch, round_ = session.pod, session.epoch, session.round
    trainer = inference = None
    if pod.role == "trainer":
        trainer = TrainerFacts(
            run_id=pod.run_id,
            ranks=pod.trainer_ranks,
            world_size=pod.trainer_world,
            published=session.published,
            committed=session.committed,
        )
    else:
        inference = InferenceFacts(
            workers=pod.local_ranks,
            live_version=session.live,
            torn=session.torn,
            in_place=pod.in_place,
            serving=session.guard.open,
            closed_because=session.guard.because,
            halted=None
            if session.halt is None or session.halt.step != "done"
            else Halted(term=session.halt.term, round=session.halt.round),
        )
    return AgentState(
        role=pod.role,
        boot_id=pod.boot_id,
        pod_name=pod.name,
        pod_uid=pod.uid,
        revision=revision,
        trainer=trainer,
        inference=inference,
        object_uid=session.object_uid,
        epoch=None
        if epoch is None
        else EpochState(
            term=epoch.request.term,
            epoch=epoch.request.epoch,
            phase=epoch.phase,
            rendezvous=epoch.rendezvous if pod.lead else None,
            plan=epoch.plan,
            problem=epoch.problem,
        ),
        round=None
        if round_ is None
        else RoundState(
            epoch=round_.epoch,
            round=round_.round,
            version=round_.version,
            phase=round_.phase,
            bytes_done=round_.bytes_done,
            bytes_total=round_.bytes_total,
            seconds=round_.seconds,
            content=round_.content,
            problem=round_.problem,
        ),
        problem=problem,
    )


# ---- the decision, asked for by a verified pod -------------------------------------------------------------


class DecisionQuery(Message):
    """Query of `GET decision`. `signature`: `sign(key, "ask", object_uid, epoch, round, nonce)`."""

    object_uid: str
    epoch: int
    round: int
    nonce: str
    signature: str


class DecisionAnswer(Message):
    """`signature`: `sign(key, "answer", object_uid, epoch, round, nonce, verdict)`."""

    verdict: Verdict
    signature: str


def sign(key: str, *parts: object) -> str:
    """HMAC-SHA256 of the parts under the epoch's key, in hex."""
    text = "\n".join(str(part) for part in parts)
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def answer_decision(session: Session, query: DecisionQuery) -> DecisionAnswer | None:
    """What this agent knows of a decision; None without the epoch's key, or for a wrong signature."""
    verdict: Verdict = "unknown"
    keys = []
    epoch, round_ = session.epoch, session.round
    if session.object_uid == query.object_uid and epoch is not None and epoch.request.epoch == query.epoch:
        keys.append(epoch.request.key)
        if round_ is not None and (round_.epoch, round_.round) == (query.epoch, query.round):
            if round_.phase is RoundPhase.COMMITTED:
                verdict = "committed"
            elif round_.phase in FINAL:
                verdict = "aborted"
    for decided in session.decisions:
        if (decided.object_uid, decided.epoch) == (query.object_uid, query.epoch) and decided.key:
            keys.append(decided.key)
            if decided.round == query.round:
                verdict = decided.verdict
    said = ("ask", query.object_uid, query.epoch, query.round, query.nonce)
    for key in keys:
        if hmac.compare_digest(sign(key, *said), query.signature):
            return DecisionAnswer(verdict=verdict, signature=sign(key, "answer", *said[1:], verdict))
    return None
