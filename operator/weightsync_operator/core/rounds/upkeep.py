"""What every look puts right: rounds that nobody runs, who serves, and the pods' gates."""

from __future__ import annotations

from weightsync_engine.protocol.messages import (
    Abort,
    Admit,
    Commit,
    Fence,
    InferenceFacts,
    Problem,
    RoundPhase,
)
from weightsync_engine.protocol.names import ROLE_INFERENCE

from ... import names
from ...api.types import MemberIdentity
from ..members import SILENT_AFTER, Gate, Pod
from .draft import Draft
from .questions import committed_version, committing, flipping, holds
from .values import GateChange

_ENDED = (RoundPhase.COMMITTED, RoundPhase.ABORTED, RoundPhase.FAILED)


def end_strays(draft: Draft) -> None:
    """Ends rounds that agents hold and nobody runs: an unrecorded one is aborted, a decided one
    committed."""
    running, decision = draft.memory.round, draft.facts.decision
    for pod in draft.seen.pods:
        state = pod.agent.state
        if state is None or state.round is None or state.round.phase in _ENDED:
            continue
        held = (state.round.epoch, state.round.round)
        if running is not None and held == (running.epoch, running.number):
            continue
        identity = MemberIdentity(
            pod=pod.name, uid=pod.uid, boot_id=state.boot_id, role=state.role, first_rank=0, ranks=1
        )
        if decision is not None and held == (decision.epoch, decision.round):
            if not flipping(state.round):
                draft.send(
                    identity,
                    "commit",
                    Commit,
                    epoch=held[0],
                    round=held[1],
                    version=decision.version,
                    deadline_seconds=draft.spec.limits.commit,
                )
            continue
        if state.round.phase is RoundPhase.COMMITTING:
            continue
        aborted = draft.memory.aborted
        problem = (
            aborted[2]
            if aborted is not None and aborted[:2] == held
            else Problem(
                reason=names.OPERATOR_RESTARTED,
                message="no decision on this round was recorded; it is given up",
            )
        )
        draft.wake(draft.settings.tick)
        draft.send(identity, "abort", Abort, epoch=held[0], round=held[1], problem=problem)


def tell_trainers(draft: Draft) -> None:
    """A trainer's agent that has restarted since the newest decision is told of it: the training process waits for
    that word before it publishes again."""
    decision = draft.facts.decision
    if decision is None or draft.memory.round is not None:
        return
    for member in draft.roster.trainers:
        facts = member.state.trainer
        if facts is None or facts.committed is not None or facts.run_id != decision.run_id:
            continue
        draft.wake(draft.settings.tick)
        draft.send(
            member.identity,
            "commit",
            Commit,
            epoch=decision.epoch,
            round=decision.round,
            version=decision.version,
            deadline_seconds=draft.spec.limits.commit,
        )


def admit_or_fence(draft: Draft) -> None:
    """Opens the guard of servers that hold what the fleet serves, closes that of those that do not."""
    run = draft.memory.round
    between = run is not None and run.barrier and run.phase in ("halt", "confirm")
    # A round is over for those beside it once it is decided: what they are admitted with is its version.
    over = draft.memory.next_round - 1 if run is None or run.phase == "commit" else run.number - 1
    for member in draft.roster.inference:
        facts = member.state.inference
        if facts is None:
            continue
        if holds(facts, draft.facts, draft.spec):
            if not facts.serving and not between:
                draft.send(member.identity, "admit", Admit, version=facts.live_version, after=over)
                draft.wake(draft.settings.tick)
        elif facts.serving and not committing(draft.memory, draft.seen, member, draft.settings):
            reason, message = _why_out(draft, facts)
            draft.send(member.identity, "fence", Fence, problem=Problem(reason=reason, message=message))
            draft.wake(draft.settings.tick)


def _why_out(draft: Draft, facts: InferenceFacts) -> tuple[str, str]:
    version = committed_version(draft.facts)
    if facts.torn:
        told = facts.closed_because or "its live weights are of no one version"
        return names.TORN, f"{told}; the next complete round mends it"
    if version is None:
        return names.NO_VERSION_YET, "spec.beforeFirstVersion is Closed and no version is committed yet"
    return (
        names.OUT_OF_SYNC,
        f"it holds {facts.live_version or 'what it loaded at start'}, the fleet serves {version}",
    )


def set_gates(draft: Draft) -> None:
    """The pods' readiness gates as what is known of them demands."""
    candidates = {member.identity.uid: member for member in draft.roster.inference}
    remarks = {remark.pod: remark for remark in draft.roster.remarks if not remark.takes_part}
    for pod in draft.seen.pods:
        if pod.role != ROLE_INFERENCE or not pod.has_gate or pod.terminating:
            continue
        member, state = candidates.get(pod.uid), pod.agent.state
        if member is not None and member.state.inference is not None:
            facts = member.state.inference
            if holds(facts, draft.facts, draft.spec):
                if facts.serving:
                    _gate(draft, pod, True, names.IN_SYNC_REASON, "")
                elif pod.gate is None or pod.gate.status:
                    _gate(draft, pod, False, names.NOT_ADMITTED, facts.closed_because or "not serving yet")
            elif not committing(draft.memory, draft.seen, member, draft.settings):
                _gate(draft, pod, False, *_why_out(draft, facts))
        elif state is not None and state.inference is not None and state.role == ROLE_INFERENCE:
            # Silent or out of order. A pod that the operator merely cannot reach goes on as it was,
            # unless it is known to be behind: a partition must not take a fleet that is in sync out of
            # service.
            remark = remarks.get(pod.name)
            silent = remark is not None and remark.reason == names.AGENT_SILENT
            if remark is not None and (not silent or not holds(state.inference, draft.facts, draft.spec)):
                _gate(draft, pod, False, remark.reason, remark.message)
        elif pod.gate is not None and pod.gate.status and pod.name in remarks:
            remark = remarks[pod.name]
            if remark.reason not in names.STARTING:
                _gate(draft, pod, False, remark.reason, remark.message)


def _gate(draft: Draft, pod: Pod, status: bool, reason: str, message: str) -> None:
    if pod.gate != Gate(status, reason):
        draft.gates.append(GateChange(pod.name, pod.uid, status, reason, message[:1024]))


def watch_silence(draft: Draft) -> None:
    """Looks again when an agent that stopped answering would count as silent."""
    for pod in draft.seen.pods:
        error = pod.agent.error
        if error is not None and pod.agent.state is not None:
            left = error.since + SILENT_AFTER - draft.now
            if left > 0:
                draft.wake(left + 0.01)
