"""A round after its decision: every member has the version in the end, or is kept from serving."""

from __future__ import annotations

from dataclasses import replace

from weightsync_engine.protocol.messages import AgentState, Commit, RoundPhase
from weightsync_engine.protocol.names import ROLE_INFERENCE

from ... import names
from ...api.types import MAX_ROUNDS, MemberIdentity, RoundReport
from .draft import Draft, pods_in_words, stamp
from .questions import UNCHANGED, flipping, round_state, unchanged
from .values import RoundRun


def roll_forward(draft: Draft) -> None:
    """Whoever recorded it: a decision that is not finished becomes the round under way."""
    decision, running = draft.facts.decision, draft.memory.round
    if decision is None:
        return
    # Numbers of rounds only grow, over restarts too: what an operator remembers begins anew, the record does not.
    draft.memory = replace(draft.memory, next_round=max(draft.memory.next_round, decision.round + 1))
    if decision.finished:
        return
    if running is not None and running.number == decision.round:
        if running.phase != "commit":
            draft.memory = replace(
                draft.memory, round=replace(running, phase="commit", phase_since=draft.now)
            )
        return
    draft.event(
        "Normal",
        names.EVENT_ROLLED_FORWARD,
        f"version {decision.version} was decided before this operator started; it is committed now",
    )
    draft.memory = replace(
        draft.memory,
        round=RoundRun(
            epoch=decision.epoch,
            number=decision.round,
            version=decision.version,
            run_id=decision.run_id,
            sequence=decision.sequence,
            members=decision.members,
            phase="commit",
            started=draft.now,
            phase_since=draft.now,
            decide_by=draft.now,
            rolled_forward=True,
        ),
    )


def advance(draft: Draft, run: RoundRun) -> None:
    """After the decision there is no way back: told until each member has it or is kept from serving."""
    draft.wake(draft.settings.tick)
    decision = draft.facts.decision
    if decision is None or decision.round != run.number:
        raise RuntimeError(f"round {run.number} commits without a recorded decision")
    if decision.finished:
        _finish(draft, run)
        return
    overdue = draft.now > run.phase_since + draft.spec.limits.commit + draft.settings.grace
    undone = [m for m in run.members if not _done(draft, m, run, overdue)]
    if not undone:
        draft.record = draft.facts.model_copy(
            update={"decision": decision.model_copy(update={"finished": True})}
        )
        return
    lead = [m for m in undone if m.first_rank == 0]
    lead_first = lead and draft.now < run.phase_since + draft.settings.lead_wait
    for member in lead if lead_first else undone:
        in_round = round_state(draft.state(member), member, run.epoch, run.number)
        if in_round is not None and flipping(in_round):
            continue
        if overdue and member.role == ROLE_INFERENCE:
            continue  # `upkeep.admit_or_fence` closes it
        draft.send(
            member,
            "commit",
            Commit,
            epoch=run.epoch,
            round=run.number,
            version=run.version,
            deadline_seconds=draft.spec.limits.commit,
        )


def _done(draft: Draft, member: MemberIdentity, run: RoundRun, overdue: bool) -> bool:
    """Whether nothing more is to be told to this member."""
    if draft.gone(member):
        return True
    state = draft.state(member)
    if member.role != ROLE_INFERENCE:
        if overdue:
            return True
        in_round = round_state(state, member, run.epoch, run.number)
        return (in_round is not None and in_round.phase is RoundPhase.COMMITTED) or (
            state is not None and state.trainer is not None and state.trainer.committed == run.version
        )
    if state is None or state.inference is None:
        return overdue
    if _has_version(member, state, run):
        return True
    in_round = round_state(state, member, run.epoch, run.number)
    failed = in_round is not None and in_round.phase is RoundPhase.FAILED
    closed = not state.inference.serving
    return (closed and (failed or overdue)) or (overdue and bool(draft.silent(member)))


def _has_version(member: MemberIdentity, state: AgentState, run: RoundRun) -> bool:
    assert state.inference is not None
    in_round = round_state(state, member, run.epoch, run.number)
    if in_round is not None:
        return in_round.phase is RoundPhase.COMMITTED
    # An agent that lost the round but whose workers hold the version: the flip was done.
    return state.inference.live_version == run.version and not state.inference.torn


def _finish(draft: Draft, run: RoundRun) -> None:
    rate = run.bytes_total / run.seconds / 1e9 if run.seconds else None
    left = [
        m
        for m in run.members
        if m.role == ROLE_INFERENCE and ((state := draft.state(m)) is None or not _has_version(m, state, run))
    ]
    last, alike = draft.memory.last_committed, 1
    if last is not None and run.content and last.content == run.content:
        alike = last.alike + (last.version != run.version)
    report = RoundReport(
        number=run.number,
        version=run.version,
        outcome="Committed",
        content=run.content,
        alike=alike,
        finished_at=stamp(draft.seen.wall),
        duration=f"{run.seconds:.2f}s" if run.seconds is not None else "",
        rate=f"{rate:.3g} GB/s" if rate else "",
        culprit=left[0].pod if left else "",
        reason=names.COMMIT_LATE if left else "",
        message=f"not live on {pods_in_words(left)}, which is kept from serving" if left else "",
    )
    if left:
        draft.event("Warning", names.COMMIT_LATE, f"version {run.version}: {report.message}")
    count = sum(m.role == ROLE_INFERENCE for m in run.members) - len(left)
    draft.event("Normal", names.EVENT_COMMITTED, f"version {run.version} is live on {count} inference pods")
    if unchanged(report):
        draft.event("Warning", names.PAYLOAD_UNCHANGED, UNCHANGED)
    draft.memory = replace(
        draft.memory,
        round=None,
        rounds=(report, *draft.memory.rounds)[:MAX_ROUNDS],
        last_committed=report,
        round_backoff=None,
        failure=None,
    )
