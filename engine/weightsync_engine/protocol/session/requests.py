"""`handle`: what each request of the operator makes of a session, or why it is refused."""

from __future__ import annotations

from dataclasses import replace

from ..messages import (
    Abort,
    Addressed,
    Admit,
    Commit,
    EpochPhase,
    Fence,
    Halt,
    JoinEpoch,
    Leave,
    Prepare,
    RoundPhase,
    Transfer,
)
from ..mover import MoverTransfer
from ..names import PROTOCOL_VERSION
from .state import (
    FINAL,
    ORDER,
    TORN,
    Accepted,
    Answer,
    Effect,
    EndRequests,
    Epoch,
    GoOn,
    Guard,
    HaltMark,
    Hold,
    OpenGuard,
    OpenStore,
    Pod,
    Refused,
    Round,
    Session,
    StartTransfer,
    refuse,
)
from .steps import (
    act_on_decision,
    check_ready,
    close_guard,
    drop_epoch,
    end_round,
    fail_epoch_only,
    in_flux,
    join_movers,
    kill_movers,
    let_go,
    mirror,
    name_of,
    no_longer_halted,
    not_settled,
    remember,
    settle,
    tell_movers,
)


def handle(session: Session, request: Addressed, now: float) -> Answer:
    """Answer one request of the operator. A refusal changes nothing."""
    answer = _handle(session, request, now)
    if isinstance(answer, Refused):
        return answer
    after, effects = settle(answer.session, now)
    return Accepted(after, answer.effects + effects)


def _handle(session: Session, request: Addressed, now: float) -> Answer:
    pod = session.pod
    if request.protocol != PROTOCOL_VERSION:
        return refuse(
            "ProtocolMismatch",
            f"the operator speaks protocol {request.protocol}, this agent {PROTOCOL_VERSION}: "
            "upgrade the older one",
        )
    if request.boot_id != pod.boot_id:
        return refuse(
            "AnotherProcess",
            f"the request is meant for process {request.boot_id!r}, this is {pod.boot_id!r}: "
            "it restarted and knows nothing of what was before",
        )
    if session.object_uid not in (None, request.object_uid):
        if not isinstance(request, JoinEpoch | Halt | Admit | Fence | Leave):
            return refuse(
                "AnotherObject", "this agent belongs to another WeightSync object; it knows no such epoch"
            )
        if session.round is not None and session.round.flipping:
            return refuse(
                "FlipRunning", "a flip for the former WeightSync object is still running; try again"
            )
        session, dropped = drop_epoch(session)
        session = replace(
            session, object_uid=request.object_uid, term=request.term, last_epoch=0, halt=None, over=(0, 0)
        )
        answer = _dispatch(session, request, now)
        return Accepted(answer.session, dropped + answer.effects) if isinstance(answer, Accepted) else answer
    if request.term < session.term:
        return refuse(
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
                return refuse("WrongRole", "a trainer pod serves nothing and cannot be fenced")
            return Accepted(*close_guard(session, request.problem.message))
        case Leave():
            return _leave(session, request)
    return refuse("UnknownRequest", f"no such request: {type(request).__name__}")


def _join(session: Session, request: JoinEpoch, now: float) -> Answer:
    pod, old = session.pod, session.epoch
    if old is not None and request.epoch == old.request.epoch:
        unlike = {"term", "deadline_seconds", "protocol"}
        if request.model_dump(exclude=unlike) == old.request.model_dump(exclude=unlike):
            return Accepted(session)
        return refuse("EpochDiffers", f"epoch {request.epoch} was joined with other ranks, key or addresses")
    if request.epoch <= session.last_epoch:
        return refuse(
            "OlderEpoch", f"epoch {request.epoch} is over: epoch {session.last_epoch} came after it"
        )
    if session.round is not None and session.round.flipping:
        return refuse("FlipRunning", f"version {session.round.version!r} is being made live; try again")
    if session.round is not None and session.round.held:
        # Bounded: without a decision the pod lets go of it, closed.
        return refuse("Halted", f"round {session.round.round} is undecided here: commit or abort it first")
    if (wrong := _wrong_join(pod, request)) is not None:
        return wrong
    session, effects = drop_epoch(session)
    epoch = Epoch(request, EpochPhase.JOINING, now + request.deadline_seconds, request.rendezvous)
    session = replace(session, epoch=epoch, last_epoch=request.epoch)
    if pod.lead:
        return Accepted(session, (*effects, OpenStore(request.epoch)))
    session, joins = join_movers(session, now)
    return Accepted(session, effects + joins)


def _wrong_join(pod: Pod, request: JoinEpoch) -> Refused | None:
    stop = request.first_rank + pod.local_ranks
    if stop > request.world_size or request.trainer_ranks >= request.world_size:
        return refuse(
            "BadRanks",
            f"ranks [{request.first_rank}, {stop}) and {request.trainer_ranks} trainer ranks do not fit "
            f"into a world of {request.world_size}",
        )
    if pod.role == "trainer":
        if (
            tuple(range(request.first_rank, stop)) != pod.trainer_ranks
            or request.trainer_ranks != pod.trainer_world
        ):
            return refuse(
                "BadRanks",
                f"this pod holds trainer ranks {list(pod.trainer_ranks)} of {pod.trainer_world}, not "
                f"[{request.first_rank}, {stop}) of {request.trainer_ranks}",
            )
    elif request.first_rank < request.trainer_ranks:
        return refuse("BadRanks", f"rank {request.first_rank} belongs to the trainer: workers come after it")
    if pod.lead:
        if request.rendezvous is not None:
            return refuse("BadRendezvous", "this pod hosts rank 0 and opens the store itself")
        return None
    if request.rendezvous is None:
        return refuse("BadRendezvous", "only the pod of rank 0 may join without the store's address")
    for place in (request.rendezvous, request.lead_agent):
        host = place.host.strip("[]").lower()
        loopback = host.startswith("127.") or host in ("::1", "localhost")
        if host in ("", "0.0.0.0", "::") or (loopback and not _is_loopback(pod.host)):
            return refuse("BadRendezvous", f"{place.host!r} is no address of another pod")
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
        return refuse("RoundDiffers", f"round {request.round} is of version {current.version!r}")
    if request.round <= max(session.epoch.round_floor, current.round if current else 0):
        return refuse("OlderRound", f"round {request.round} is over")
    if session.epoch.phase is not EpochPhase.JOINED:
        return refuse("EpochNotJoined", f"epoch {request.epoch} is {session.epoch.phase}")
    if current is not None and ORDER[RoundPhase.READY] < ORDER[current.phase] and current.phase not in FINAL:
        return refuse("RoundRunning", f"round {current.round} is {current.phase}: commit or abort it first")
    if session.unsettled is not None:
        return refuse("Unsettled", not_settled(session.unsettled))
    session, effects = let_go(session, GoOn())
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
    session, more = check_ready(replace(session, round=round_, over=over))
    return Accepted(session, effects + more)


def _transfer(session: Session, request: Transfer, now: float) -> Answer:
    if (wrong := _wrong_round(session, request.epoch, request.round)) is not None:
        return wrong
    round_, epoch = session.round, session.epoch
    assert round_ is not None and epoch is not None
    if round_.phase is RoundPhase.PREPARING:
        return refuse("NotReady", f"round {round_.round} is still being prepared here")
    if round_.phase is RoundPhase.ABORTED:
        return refuse("RoundAborted", f"round {round_.round} was aborted")
    if round_.phase is not RoundPhase.READY:
        return Accepted(session)
    if epoch.phase is not EpochPhase.JOINED:
        return refuse("EpochFailed", f"epoch {request.epoch} is {epoch.phase}")
    if session.pod.in_place and not round_.held:
        return refuse("NotReady", f"the scheduler does not stand still for round {round_.round} any more")
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
        return refuse("WrongRole", "a trainer pod generates nothing and cannot be halted")
    mark, known = (request.term, request.round), session.halt
    if mark <= session.over or (known is not None and mark < known.number):
        return refuse("OlderRound", f"round {request.round} is over")
    if known is not None and known.number == mark and known.step != "failed":
        return Accepted(session)
    round_ = session.round
    if round_ is not None and (round_.epoch, round_.round) == (request.epoch, request.round):
        if round_.phase in FINAL:
            return refuse("RoundOver", f"round {request.round} is {round_.phase} here")
        if round_.phase is RoundPhase.COMMITTING:
            return Accepted(session)
        if round_.phase is not RoundPhase.VERIFIED:
            return refuse("NotVerified", f"round {request.round} is {round_.phase} here")
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
    session, closed = close_guard(
        session, f"round {request.round} goes live without this pod; it comes after it"
    )
    session, _ = let_go(session, EndRequests())
    session = replace(session, halt=HaltMark(request.term, request.epoch, request.round))
    return Accepted(session, (*closed, EndRequests(mark)))


def _commit(session: Session, request: Commit) -> Answer:
    round_ = session.round
    known = round_ is not None and (round_.epoch, round_.round) == (request.epoch, request.round)
    if known:
        assert round_ is not None
        if request.version != round_.version:
            return refuse("RoundDiffers", f"round {request.round} is of version {round_.version!r}")
        if round_.phase is RoundPhase.COMMITTED or round_.flipping:
            return Accepted(session)
        if round_.phase in (RoundPhase.VERIFIED, RoundPhase.COMMITTING):
            return Accepted(*act_on_decision(session, request.deadline_seconds))
    elif _restarted_since(session, request):
        return Accepted(*_mirror_past(session, request))
    elif request.epoch < session.last_epoch:
        return refuse("OlderEpoch", f"epoch {request.epoch} is over")
    elif round_ is not None and round_.epoch == request.epoch and request.round < round_.round:
        return refuse("OlderRound", f"round {request.round} is over")
    if session.pod.role == "inference":
        if not session.live_known:
            return refuse("NotReady", "the workers have not said yet which version they hold; try again")
        if session.unsettled is not None:
            return refuse("Unsettled", not_settled(session.unsettled))
        if session.live == request.version and not session.torn and not in_flux(session):
            # This agent restarted after the flip: the workers are the truth.
            done = Round(request.epoch, request.round, request.version, RoundPhase.COMMITTED, None, None)
            if known or session.epoch is None:
                session = replace(session, round=done)
            return Accepted(session)
    if known:
        assert round_ is not None
        return refuse(
            "NotVerified", f"round {request.round} is {round_.phase} here: nothing verified to commit"
        )
    return refuse("UnknownRound", f"this agent knows no round {request.round} of epoch {request.epoch}")


def _restarted_since(session: Session, request: Commit) -> bool:
    """A trainer's agent that knows of no decision, asked to commit what was decided before it began."""
    if session.pod.role != "trainer" or session.committed is not None:
        return False
    return request.epoch < session.last_epoch or (session.epoch is None and session.round is None)


def _mirror_past(session: Session, request: Commit) -> tuple[Session, tuple[Effect, ...]]:
    """Mirror such a decision, for the handles and for pods that ask; an epoch that was joined since goes on."""
    done = Round(request.epoch, request.round, request.version, RoundPhase.COMMITTED, None, None)
    mirrored, effects = mirror(replace(session, round=done))
    if session.epoch is None and session.round is None:
        return mirrored, effects
    return replace(mirrored, round=session.round), effects


def _abort(session: Session, request: Abort) -> Answer:
    if (wrong := _wrong_epoch(session, request.epoch)) is not None:
        return wrong
    round_, epoch = session.round, session.epoch
    assert epoch is not None
    if round_ is None or request.round > round_.round:
        if round_ is not None and round_.phase not in FINAL and ORDER[round_.phase] > ORDER[RoundPhase.READY]:
            return refuse("RoundRunning", f"round {round_.round} is {round_.phase}: commit or abort it first")
        epoch = replace(epoch, round_floor=max(epoch.round_floor, request.round))
        return Accepted(replace(session, epoch=epoch))
    if request.round < round_.round:
        return refuse("OlderRound", f"round {request.round} is over")
    if round_.phase in (RoundPhase.COMMITTING, RoundPhase.COMMITTED):
        return refuse(
            "AlreadyCommitted", f"round {request.round} is {round_.phase}: a decision is never undone"
        )
    if round_.phase in FINAL:
        return Accepted(
            session, tell_movers(session, all_ranks=True, final=request.final) if request.final else ()
        )
    effects: tuple[Effect, ...] = ()
    if round_.phase is RoundPhase.TRANSFERRING:
        session, effects = kill_movers(session, tuple(session.movers), f"round {round_.round} was aborted")
        session = fail_epoch_only(session, request.problem)
    session, go_on = let_go(session, GoOn(), request.problem)
    session = replace(session, round=end_round(round_, RoundPhase.ABORTED, request.problem))
    session = remember(no_longer_halted(session, round_), "aborted")
    return Accepted(session, effects + go_on + tell_movers(session, all_ranks=True, final=request.final))


def _admit(session: Session, request: Admit) -> Answer:
    if session.pod.role != "inference":
        return refuse("WrongRole", "a trainer pod serves nothing and cannot be admitted")
    if not session.live_known:
        return refuse("NotReady", "the workers have not said yet which version they hold; try again")
    if session.torn:
        return refuse("Torn", f"{TORN}: a whole round must succeed first")
    round_ = session.round
    if session.halt is not None and (request.term, request.after) < session.halt.number:
        return refuse("Halted", f"halted for round {session.halt.round}, which is not over")
    if session.unsettled is not None:
        return refuse("Unsettled", not_settled(session.unsettled))
    if round_ is not None and (round_.fenced or round_.held or in_flux(session)):
        return refuse(
            "Undecided",
            f"round {round_.round} is {round_.phase} and undecided here: commit or abort it first",
        )
    if round_ is not None and round_.phase is RoundPhase.COMMITTING:
        return refuse("Committing", f"version {round_.version!r} is being made live: admit it afterwards")
    if session.live != request.version:
        return refuse("NotLive", f"{name_of(session.live)} is live here, not {name_of(request.version)}")
    session = replace(session, over=max(session.over, (request.term, request.after)), halt=None)
    if session.guard.open and session.guard.admitted == request.version:
        return Accepted(session)
    session = replace(session, guard=Guard(True, request.version, ""))
    return Accepted(session, (OpenGuard(request.version),))


def _leave(session: Session, request: Leave) -> Answer:
    if request.epoch < session.last_epoch:
        return refuse(
            "OlderEpoch", f"epoch {request.epoch} is over: epoch {session.last_epoch} came after it"
        )
    if session.round is not None and session.round.flipping:
        return refuse("FlipRunning", f"version {session.round.version!r} is being made live; try again")
    session, effects = drop_epoch(session)
    return Accepted(replace(session, last_epoch=request.epoch), effects)


def _wrong_epoch(session: Session, epoch: int) -> Refused | None:
    if session.epoch is not None and session.epoch.request.epoch == epoch:
        return None
    if epoch <= session.last_epoch:
        return refuse("OlderEpoch", f"epoch {epoch} is over here")
    return refuse("UnknownEpoch", f"this agent has not joined epoch {epoch}")


def _wrong_round(session: Session, epoch: int, round_: int) -> Refused | None:
    if (wrong := _wrong_epoch(session, epoch)) is not None:
        return wrong
    assert session.epoch is not None
    current = session.round
    if current is not None and current.round == round_:
        return None
    if round_ <= max(session.epoch.round_floor, current.round if current else 0):
        return refuse("OlderRound", f"round {round_} is over")
    return refuse("UnknownRound", f"round {round_} was not prepared here")
