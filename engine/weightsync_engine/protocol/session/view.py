"""What a session tells: its state as the operator reads it, and when time alone will change it."""

from __future__ import annotations

from ..messages import (
    AgentState,
    EpochPhase,
    EpochState,
    Halted,
    InferenceFacts,
    Problem,
    RoundPhase,
    RoundState,
    TrainerFacts,
)
from .state import FINAL, ORDER, Session


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
            starting=len(session.met) < pod.local_ranks,
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
