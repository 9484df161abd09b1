"""`observe`: what movers, flips, stores and time make of a session."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from ..messages import EpochPhase, Problem, RoundPhase
from .state import (
    ASK_AGAIN_SECONDS,
    FINAL,
    LEARNT_FLIP_SECONDS,
    STANDING_SECONDS,
    AskDecision,
    CloseGuard,
    CloseStore,
    DecisionLearnt,
    Effect,
    EndRequests,
    Event,
    FlipEnded,
    GoOn,
    Guard,
    HoldEnded,
    LiveObserved,
    MoverLost,
    MoverReported,
    RequestsEnded,
    Round,
    Session,
    Settled,
    StoreFailed,
    StoreOpened,
    TimePassed,
    make_problem,
)
from .steps import (
    act_on_decision,
    check_ready,
    close_guard,
    end_round,
    entangled,
    fail_epoch,
    fail_round,
    in_flux,
    join_movers,
    kill_movers,
    let_go,
    name_of,
    no_longer_halted,
    ranks_without,
    settle,
    settled,
    take_live,
    tell_committed,
    tell_movers,
    who_is,
)


def observe(session: Session, event: Event, now: float) -> tuple[Session, tuple[Effect, ...]]:
    """Take in what happened. Events of things that are over change nothing."""
    session, effects = _observe(session, event, now)
    session, more = settle(session, now)
    return session, effects + more


def _observe(session: Session, event: Event, now: float) -> tuple[Session, tuple[Effect, ...]]:
    match event:
        case MoverReported():
            session, effects = _mover_reported(session, event, now)
            return _note_progress(session, event.local_rank, now), effects
        case MoverLost():
            return _mover_lost(session, event)
        case StoreOpened(epoch, rendezvous):
            if session.epoch is None or session.epoch.request.epoch != epoch:
                return session, (CloseStore(epoch),)
            return join_movers(replace(session, epoch=replace(session.epoch, rendezvous=rendezvous)), now)
        case StoreFailed(epoch, problem):
            if session.epoch is None or session.epoch.request.epoch != epoch:
                return session, ()
            return fail_epoch(session, problem)
        case FlipEnded():
            return _flip_ended(session, event)
        case HoldEnded():
            return _hold_ended(session, event)
        case RequestsEnded():
            return _requests_ended(session, event)
        case LiveObserved(live, torn):
            return (session, ()) if in_flux(session) else take_live(session, live, torn)
        case Settled():
            return settled(session, event)
        case DecisionLearnt():
            return _decision_learnt(session, event, now)
        case TimePassed():
            return _time_passed(session, now)


def _mover_reported(session: Session, event: MoverReported, now: float) -> tuple[Session, tuple[Effect, ...]]:
    state, local_rank = event.state, event.local_rank
    if state.mover_id in session.condemned or local_rank >= session.pod.local_ranks:
        return session, ()
    before = session.movers.get(local_rank)
    effects: tuple[Effect, ...] = ()
    if before is not None and before.mover_id != state.mover_id:
        session, effects = _mover_lost(session, MoverLost(local_rank, before.mover_id))
    session = replace(session, movers={**session.movers, local_rank: state}, met=session.met | {local_rank})
    if before is None or before.mover_id != state.mover_id:
        effects += tell_movers(session, only=local_rank) or tell_committed(session, local_rank)
    for step in (_see_published, partial(join_movers, now=now), _see_epoch, check_ready, _see_round):
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
            problem = state.epoch.problem or make_problem(
                "MoverFailed", "the mover gave no reason", epoch.request.first_rank + local_rank
            )
            session, effects = kill_movers(session, entangled(session), f"epoch failed: {problem.reason}")
            session, more = fail_epoch(session, problem)
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
            return fail_round(
                session, r.problem or make_problem("TransferFailed", "the mover gave no reason")
            )
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
    problem = make_problem("MoverLost", f"the mover of rank {rank} (pod {session.pod.name}) is gone", rank)
    effects: tuple[Effect, ...] = ()
    if session.round is not None and session.round.phase is RoundPhase.TRANSFERRING:
        session, effects = kill_movers(session, tuple(session.movers), problem.message)
    session, more = fail_epoch(session, problem)
    return session, effects + more


def _flip_ended(session: Session, event: FlipEnded) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    mine = (
        round_ is not None and (round_.epoch, round_.round) == (event.epoch, event.round) and round_.flipping
    )
    if not mine:
        return (session, ()) if in_flux(session) else take_live(session, event.live, event.torn)
    assert round_ is not None
    if event.live == round_.version and not event.torn:
        # Of a flip that failed after the weights were live, the server leaves a held scheduler held.
        go_on = (GoOn(),) if round_.held and event.problem is not None else ()
        session = replace(
            no_longer_halted(session, round_),
            live=event.live,
            torn=False,
            live_known=True,
            over=max(session.over, (session.term, round_.round)),
            round=end_round(round_, RoundPhase.COMMITTED, None),
        )
        if session.guard.open:
            # In sync before the flip, in sync after it: serving never stops.
            session = replace(session, guard=Guard(True, round_.version, ""))
            return session, go_on
        because = f"version {round_.version!r} is live; waiting for the operator to admit it"
        return replace(session, guard=Guard(False, None, because)), (CloseGuard(because), *go_on)
    problem = event.problem or make_problem(
        "FlipFailed", f"the workers hold {name_of(event.live)} after the flip"
    )
    session = replace(session, round=replace(round_, flipping=False, problem=problem))
    session, effects = take_live(session, event.live, event.torn)
    session, closed = close_guard(
        session, f"version {round_.version!r} was decided but is not live: {problem.message}"
    )
    # Nowhere else are the old weights in use any more.
    session, end = let_go(session, EndRequests())
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
    session, _ = let_go(replace(session, round=replace(round_, held=False)), GoOn(), event.problem)
    session = replace(session, round=end_round(round_, RoundPhase.FAILED, event.problem))
    return no_longer_halted(session, round_), ()


def _stands_still(
    session: Session, round_: Round, problem: Problem | None
) -> tuple[Session, tuple[Effect, ...]]:
    """In place: the scheduler stands still, so the transfer may begin; or it goes on as before."""
    if problem is not None:
        session = replace(session, round=replace(round_, held=False))
        return fail_round(session, problem)
    deadline = None if round_.deadline is None else round_.deadline + STANDING_SECONDS
    return replace(session, round=replace(round_, phase=RoundPhase.READY, deadline=deadline)), ()


def _requests_ended(session: Session, event: RequestsEnded) -> tuple[Session, tuple[Effect, ...]]:
    if session.halt is None or session.halt.number != event.mark:
        return session, ()
    step: Literal["done", "failed"] = "failed" if event.problem else "done"
    return replace(session, halt=replace(session.halt, step=step)), ()


def _decision_learnt(
    session: Session, event: DecisionLearnt, now: float
) -> tuple[Session, tuple[Effect, ...]]:
    round_ = session.round
    if round_ is None or (round_.epoch, round_.round) != (event.epoch, event.round) or not round_.asking:
        return session, ()
    if event.verdict == "committed":
        return act_on_decision(session, LEARNT_FLIP_SECONDS)
    if event.verdict == "aborted":
        problem = make_problem("Aborted", "the trainer's agent says that the round was aborted")
        was_fenced = round_.fenced
        session, go_on = let_go(session, GoOn(), problem)
        session = replace(session, round=end_round(round_, RoundPhase.ABORTED, problem))
        session = no_longer_halted(session, round_)
        if not was_fenced:
            return session, go_on
        return close_guard(session, "the round was aborted; waiting for the operator to admit this pod again")
    round_ = replace(round_, asking=False, fenced=True, decide_by=now + ASK_AGAIN_SECONDS)
    session, closed = close_guard(
        replace(session, round=round_),
        f"version {round_.version!r} is verified and nobody says whether it was committed",
    )
    session, end = let_go(session, EndRequests())
    return session, closed + end


def _time_passed(session: Session, now: float) -> tuple[Session, tuple[Effect, ...]]:
    session, effects = _unsettled_too_long(session, now)
    epoch = session.epoch
    if epoch is not None and epoch.phase is EpochPhase.JOINING and now >= epoch.deadline:
        late = _late_joiners(session)
        session, kills = kill_movers(session, entangled(session, overdue=True), "the epoch's deadline passed")
        session, more = fail_epoch(session, late)
        effects += kills + more
    round_ = session.round
    if round_ is None or round_.phase in FINAL:
        return session, effects
    due = round_.deadline is not None and now >= round_.deadline
    if session.pod.in_place and round_.phase in (RoundPhase.PREPARING, RoundPhase.READY) and due:
        session, more = fail_round(session, _stood_in_vain(session))
        return session, effects + more
    if round_.phase is RoundPhase.PREPARING and due:
        ranks = [session.pod.trainer_ranks[i] for i in ranks_without(session, round_.version)]
        problem = make_problem(
            "PrepareTimeout",
            f"trainer ranks {ranks} of pod {session.pod.name} did not publish {round_.version!r} in time",
            ranks[0] if ranks else None,
        )
        session, more = fail_round(session, problem)
        return session, effects + more
    if round_.phase is RoundPhase.TRANSFERRING and round_.deadline is not None and now >= round_.deadline:
        problem = _late_movers(session, now)
        session, kills = kill_movers(session, tuple(session.movers), problem.message)
        session, more = fail_epoch(session, problem)
        return session, effects + kills + more
    if round_.decide_by is None or now < round_.decide_by:
        return session, effects
    if round_.phase in (RoundPhase.PREPARING, RoundPhase.READY):
        session, more = fail_round(session, make_problem("NoTransfer", "no transfer was asked for in time"))
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
    session, effects = kill_movers(
        session, stuck, f"round {left.round} failed, and they go on writing to the live weights"
    )
    session, closed = take_live(session, session.live, True, left.problem)
    held = (EndRequests(),) if left.held else ()
    left = replace(left, held=False, deadline=float("inf"))
    return replace(session, unsettled=left), effects + closed + held


def _stood_in_vain(session: Session) -> Problem:
    round_, pod = session.round, session.pod
    assert round_ is not None
    if round_.phase is RoundPhase.READY:
        return make_problem(
            "NoTransfer", f"pod {pod.name} stood still for a transfer that was not asked for in time"
        )
    return make_problem("HaltTimeout", f"the scheduler of pod {pod.name} did not stand still in time")


def _late_joiners(session: Session) -> Problem:
    epoch, pod = session.epoch, session.pod
    assert epoch is not None
    first = epoch.request.first_rank
    if epoch.rendezvous is None:
        return make_problem(
            "JoinTimeout", f"the store of epoch {epoch.request.epoch} did not open in pod {pod.name}", first
        )
    absent = [first + i for i in range(pod.local_ranks) if i not in epoch.joined]
    if absent:
        return make_problem("JoinTimeout", f"ranks {absent} of pod {pod.name} have no mover", absent[0])
    return make_problem(
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
        rank = f"rank {epoch.request.first_rank + i} ({who_is(session.pod, i)})"
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
    return make_problem(
        "TransferTimeout",
        f"version {round_.version!r} did not arrive in time: {', '.join(late)}; a mover that stands still is "
        "frozen, starved or cut off, and is replaced now",
    )
