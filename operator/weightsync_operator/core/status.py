"""The report part of the status: what `kubectl get` and `kubectl describe` show. Its size is bounded."""

from __future__ import annotations

from weightsync_engine.protocol.messages import RoundPhase
from weightsync_engine.protocol.names import ROLE_INFERENCE

from .. import names
from ..api.types import MAX_SHOWN_MEMBERS, Condition, MemberReport, Report
from .conditions import evaluate
from .members import Member, Remark, Roster
from .rounds import (
    Memory,
    Observed,
    Settings,
    committed_version,
    epoch_state,
    holds,
    round_state,
    serves,
)


def report(
    memory: Memory,
    observed: Observed,
    roster: Roster,
    before: tuple[Condition, ...] = (),
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> Report:
    """The report on what is true now; equal facts give an equal report, so that an idle object needs no
    write."""
    rows = [_row(member, memory, observed) for member in roster.members]
    rows += [_left_out(remark) for remark in roster.remarks if not remark.takes_part]
    in_sync = sum(serves(memory, observed, member, settings) for member in roster.inference)
    # What is wrong is shown first where not all can be shown.
    if len(rows) > MAX_SHOWN_MEMBERS:
        rows.sort(key=lambda row: row.state in (names.IN_SYNC_REASON, "Idle"))
    return Report(
        observed_generation=observed.generation,
        version=committed_version(observed.facts),
        trainers=f"{len(roster.trainers)}/{roster.labelled_trainers}",
        inference=f"{in_sync}/{max(len(roster.inference), roster.labelled_inference)}",
        last_round=memory.last_committed,
        conditions=evaluate(memory, observed, roster, before, settings),
        members=tuple(rows[:MAX_SHOWN_MEMBERS]),
        members_not_shown=len(rows) - MAX_SHOWN_MEMBERS if len(rows) > MAX_SHOWN_MEMBERS else None,
        rounds=memory.rounds,
    )


UNDER_WAY = (RoundPhase.READY, RoundPhase.TRANSFERRING, RoundPhase.VERIFIED, RoundPhase.COMMITTING)


def _left_out(remark: Remark) -> MemberReport:
    return MemberReport(
        pod=remark.pod, role=remark.role[:128], state=remark.reason[:128], message=remark.message[:1024]
    )


def _row(member: Member, memory: Memory, observed: Observed) -> MemberReport:
    state, identity, message = member.state, member.identity, ""
    epoch, run = memory.epoch, memory.round
    ranks = ""
    if epoch is not None:
        for taken in epoch.fact.members:
            if (taken.uid, taken.boot_id) == member.key:
                last = taken.first_rank + taken.ranks - 1
                ranks = f"{taken.first_rank}-{last}" if taken.ranks > 1 else f"{last}"
    in_round = round_state(state, identity, run.epoch, run.number) if run is not None else None
    in_epoch = (
        epoch_state(state, identity, observed.facts.term, epoch.fact.number) if epoch is not None else None
    )
    if in_round is not None and in_round.phase is not RoundPhase.COMMITTED:
        word = str(in_round.phase)
        message = in_round.problem.message if in_round.problem else ""
        if (
            not message
            and state.inference is not None
            and state.inference.in_place
            and in_round.phase in UNDER_WAY
        ):
            message = "stands still: its live weights are written in place"
    elif epoch is not None and not epoch.joined and ranks:
        word = str(in_epoch.phase) if in_epoch is not None else "Joining"
        message = in_epoch.problem.message if in_epoch is not None and in_epoch.problem else ""
    elif identity.role != ROLE_INFERENCE:
        word = "Idle"
    elif state.inference is not None and state.inference.torn:
        word, message = names.TORN, state.inference.closed_because
    elif state.inference is not None and not holds(state.inference, observed.facts, observed.spec):
        word = names.OUT_OF_SYNC
    elif state.inference is not None and not state.inference.serving:
        word, message = names.NOT_ADMITTED, state.inference.closed_because
    else:
        word = names.IN_SYNC_REASON if committed_version(observed.facts) else "ServesLoadedWeights"
    if state.trainer is not None:
        version = state.trainer.published.version if state.trainer.published else ""
    else:
        version = (state.inference.live_version if state.inference else None) or ""
    return MemberReport(
        pod=member.pod,
        role=identity.role,
        ranks=ranks,
        version=version,
        state=word,
        message=message[:1024],
    )
