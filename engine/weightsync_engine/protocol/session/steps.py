"""What requests and events have in common: steps from one session to the next, with their effects."""

from __future__ import annotations

from dataclasses import replace

from ..messages import EpochPhase, Problem, RoundPhase
from ..mover import MoverJoin, MoverOutcome, MoverState
from .state import (
    FINAL,
    LEAST_JOIN_SECONDS,
    ORDER,
    REMEMBERED_DECISIONS,
    SETTLE_SECONDS,
    TORN,
    AskLive,
    CloseGuard,
    CloseStore,
    Decided,
    Effect,
    EndRequests,
    Flip,
    GoOn,
    Guard,
    JoinMover,
    KillMovers,
    LeaveMovers,
    Pod,
    Round,
    Session,
    Settled,
    TellOutcome,
    Unsettled,
    Verdict,
    clip,
    make_problem,
)

# ---- rounds ------------------------------------------------------------------------------------------------


def check_ready(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    """PREPARING -> READY once every local snapshot holds the version; FAILED once one holds a later one. In place it is
    the end of the hold that makes a pod ready."""
    round_ = session.round
    if round_ is None or round_.phase is not RoundPhase.PREPARING or session.pod.in_place:
        return session, ()
    if session.pod.role == "trainer":
        missing = ranks_without(session, round_.version)
        held = session.published
        if held is not None and round_.sequence is not None and held.sequence > round_.sequence:
            return fail_round(
                session,
                make_problem(
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


def ranks_without(session: Session, version: str) -> list[int]:
    return [
        i
        for i in range(session.pod.local_ranks)
        if (s := session.movers.get(i)) is None or s.snapshot is None or s.snapshot.version != version
    ]


def no_longer_halted(session: Session, round_: Round) -> Session:
    """This round is over here."""
    halt = session.halt
    if halt is None or (halt.epoch, halt.round) != (round_.epoch, round_.round):
        return session
    return replace(session, halt=None)


def let_go(
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


def in_flux(session: Session) -> bool:
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


def not_settled(left: Unsettled) -> str:
    return f"round {left.round} failed in the middle of writing to the live weights; what is live is being looked at"


def settle(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
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


def settled(session: Session, event: Settled) -> tuple[Session, tuple[Effect, ...]]:
    left = session.unsettled
    if left is None or not left.asked or (left.epoch, left.round) != (event.epoch, event.round):
        return session, ()
    session, effects = take_live(replace(session, unsettled=None), event.live, event.torn, left.problem)
    if not left.held:
        return session, effects
    return session, (*effects, EndRequests() if event.torn else GoOn())


def act_on_decision(session: Session, flip_seconds: float) -> tuple[Session, tuple[Effect, ...]]:
    """The decision is known, and this pod is verified: act on it."""
    round_ = session.round
    assert round_ is not None and session.object_uid is not None
    if session.pod.role == "trainer":
        return mirror(replace(session, round=replace(round_, phase=RoundPhase.COMMITTED, decide_by=None)))
    round_ = replace(round_, phase=RoundPhase.COMMITTING, flipping=True, decide_by=None, asking=False)
    flip = Flip(session.object_uid, round_.epoch, round_.round, round_.version, flip_seconds, round_.flip)
    return replace(session, round=round_), (flip,)


def mirror(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    assert session.round is not None
    session = replace(session, committed=session.round.version)
    return remember(session, "committed"), tell_movers(session, all_ranks=True)


def remember(session: Session, verdict: Verdict) -> Session:
    round_ = session.round
    assert round_ is not None and session.object_uid is not None
    key = session.epoch.request.key if session.epoch and session.epoch.request.epoch == round_.epoch else ""
    decided = Decided(session.object_uid, round_.epoch, round_.round, verdict, key)
    return replace(session, decisions=(*session.decisions, decided)[-REMEMBERED_DECISIONS:])


def tell_movers(
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


def tell_committed(session: Session, local_rank: int) -> tuple[Effect, ...]:
    """To a mover that connects: its training process may not have heard of the last commit."""
    if session.pod.role != "trainer" or session.committed is None:
        return ()
    return (TellOutcome((local_rank,), MoverOutcome(version=session.committed, committed=True)),)


def end_round(round_: Round, phase: RoundPhase, problem: Problem | None) -> Round:
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


def name_of(version: str | None) -> str:
    return "the weights loaded at start" if version is None else f"version {version!r}"


# ---- epochs and movers -------------------------------------------------------------------------------------


def drop_epoch(session: Session) -> tuple[Session, tuple[Effect, ...]]:
    epoch = session.epoch
    # Also without an epoch: the movers may still be in one that a former agent process led.
    unclean = tuple(i for i in session.movers if not _clean(session, i))
    session, effects = kill_movers(session, unclean, "another epoch begins, or this one is over")
    session, go_on = let_go(session, GoOn())
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
    return state.epoch is None or state.epoch.phase is EpochPhase.JOINED or _left_unhurt(state)


def kill_movers(session: Session, ranks: tuple[int, ...], why: str) -> tuple[Session, tuple[Effect, ...]]:
    victims = tuple((i, session.movers[i].mover_id) for i in ranks if i in session.movers)
    if not victims:
        return session, ()
    movers = {i: s for i, s in session.movers.items() if i not in ranks}
    condemned = session.condemned | {mover_id for _, mover_id in victims}
    return replace(session, movers=movers, condemned=condemned), (KillMovers(victims, why),)


def _left_unhurt(state: MoverState) -> bool:
    """Whether a mover has given up an epoch in whose store alone it had waited."""
    return state.epoch is not None and state.epoch.phase is EpochPhase.FAILED and state.epoch.reusable


def entangled(session: Session, overdue: bool = False) -> tuple[int, ...]:
    """The movers to end with an epoch that failed: those that hold a communicator that will never be whole, or wait for
    it, as none could leave by itself. Who waited in the store only is kept: else a deadline that is shorter than the
    start of a mover would never be met, as each attempt would end the movers of all pods. `overdue`: the deadline has
    passed, before which each of these gives up by itself, unless it is frozen.
    """
    joined = session.epoch.joined if session.epoch is not None else {}

    def kept(local_rank: int, state: MoverState) -> bool:
        if state.epoch is None:
            return (
                joined.get(local_rank) != state.mover_id
            )  # else it was told to join, and has not said a word
        return state.epoch.reusable and (state.epoch.phase is EpochPhase.FAILED or not overdue)

    return tuple(i for i, s in session.movers.items() if not kept(i, s))


def join_movers(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
    """Tell every connected mover that was not told yet, as soon as the store's address is known; one that comes too
    late for this epoch waits for the next."""
    epoch = session.epoch
    if epoch is None or epoch.phase is not EpochPhase.JOINING or epoch.rendezvous is None:
        return session, ()
    left = epoch.deadline - now
    if left < LEAST_JOIN_SECONDS:
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
            who=who_is(pod, local_rank),
            deadline_seconds=left,
        )
        effects.append(JoinMover(local_rank, message))
    return replace(session, epoch=replace(epoch, joined=joined)), tuple(effects)


def fail_epoch_only(session: Session, problem: Problem) -> Session:
    epoch = session.epoch
    if epoch is None or epoch.phase is EpochPhase.FAILED:
        return session
    return replace(session, epoch=replace(epoch, phase=EpochPhase.FAILED, problem=problem))


def fail_epoch(session: Session, problem: Problem) -> tuple[Session, tuple[Effect, ...]]:
    """The communicator is lost. A verified round stays: its bytes are in the shadow and may be committed."""
    session = fail_epoch_only(session, problem)
    return fail_round(session, problem)


def fail_round(session: Session, problem: Problem) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or ORDER[round_.phase] >= ORDER[RoundPhase.VERIFIED]:
        return session, ()
    session, go_on = let_go(session, GoOn(), problem)
    session = replace(session, round=end_round(round_, RoundPhase.FAILED, problem))
    return session, go_on + tell_movers(session, all_ranks=True)


def take_live(
    session: Session, live: str | None, torn: bool, problem: Problem | None = None
) -> tuple[Session, tuple[Effect, ...]]:
    session = replace(session, live=live, torn=torn, live_known=True)
    if torn and not session.guard.open and problem is None and session.guard.because.startswith(TORN):
        return session, ()  # the first account has the cause
    if torn:
        why = f" ({problem.reason}: {problem.message})" if problem is not None else ""
        return close_guard(session, f"{TORN}: a whole round must succeed first{why}")
    flipping = session.round is not None and session.round.flipping
    if session.guard.open and session.guard.admitted != live and not flipping:
        return close_guard(session, f"{name_of(live)} became live outside of any round")
    return session, ()


def close_guard(session: Session, because: str) -> tuple[Session, tuple[Effect, ...]]:
    because = clip(because)
    if not session.guard.open and session.guard.because == because:
        return session, ()
    return replace(session, guard=Guard(False, None, because)), (CloseGuard(because),)


def who_is(pod: Pod, local_rank: int) -> str:
    """A rank in words: its pod, and which of several it is there."""
    if pod.role == "trainer":
        return f"pod {pod.name}"
    return f"pod {pod.name}, worker {local_rank}"
