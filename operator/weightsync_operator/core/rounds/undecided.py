"""A round until its decision: prepared, transferred, confirmed by all; any trouble aborts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from weightsync_engine.protocol.messages import (
    EpochPhase,
    Halt,
    Prepare,
    Problem,
    Published,
    RoundPhase,
    RoundState,
    Transfer,
)
from weightsync_engine.protocol.names import ROLE_INFERENCE

from ... import names
from ...api.types import MAX_EARLIER, MAX_ROUNDS, DecisionFact, MemberIdentity, RoundReport
from ..members import Pod
from .draft import MAX_SECONDS, Draft, pod_of_rank, pods_in_words, refusals, stamp, unexplained
from .questions import epoch_state, may_generate, round_state
from .values import EpochRun, Failure, RoundRun, Send


def begin(draft: Draft, epoch: EpochRun, wanted: Published) -> None:
    """A round of the epoch's members brings `wanted`, unless it has just failed to."""
    backoff = draft.memory.round_backoff
    if backoff is not None and backoff.key == (draft.roster.fingerprint, wanted.version):
        wait = backoff.until - draft.now
        if wait > 0:
            draft.wake(wait)
            return
    limits = draft.spec.limits
    number = draft.memory.next_round
    span = limits.prepare + limits.transfer + limits.commit / 2 + 2 * draft.settings.grace
    span = min(span, MAX_SECONDS - limits.commit / 2 - 1)
    run = RoundRun(
        epoch=epoch.fact.number,
        number=number,
        version=wanted.version,
        run_id=draft.roster.run_id,
        sequence=wanted.sequence,
        members=epoch.fact.members,
        phase="prepare",
        started=draft.now,
        phase_since=draft.now,
        decide_by=draft.now + span,
        policy=draft.spec.flip_policy,
        barrier=draft.spec.barrier and not _is_served(draft, wanted),
    )
    draft.memory = replace(draft.memory, round=run, next_round=number + 1)
    advance(draft, run)


def _is_served(draft: Draft, wanted: Published) -> bool:
    """Whether a round only brings it to those that lack it: nobody then changes what it generates with."""
    decision = draft.facts.decision
    return decision is not None and (
        (decision.version, decision.run_id, decision.sequence)
        == (wanted.version, draft.roster.run_id, wanted.sequence)
    )


def advance(draft: Draft, run: RoundRun) -> None:
    """As far as its members let it go: a phase that all have done makes room for the next one at once."""
    draft.wake(draft.settings.tick)
    states = {m.uid: round_state(draft.state(m), m, run.epoch, run.number) for m in run.members}
    if _is_lost(draft, run, states):
        return
    going = _prepare(draft, run, states) if run.phase == "prepare" else run
    if going is not None and going.phase == "transfer":
        going = _transfer(draft, going, states)
    if going is not None and going.phase == "halt":
        going = _to_phase(draft, going, "confirm") if _halt(draft, going) else None
    if going is not None:
        _confirm(draft, going, states)


States = Mapping[str, RoundState | None]
"""By the UIDs of the members' pods, what they say of the round."""


def _in(states: States, member: MemberIdentity, *phases: RoundPhase) -> bool:
    state = states[member.uid]
    return state is not None and state.phase in phases


def _prepare(draft: Draft, run: RoundRun, states: States) -> RoundRun | None:
    limits = draft.spec.limits
    ready = (RoundPhase.READY, RoundPhase.TRANSFERRING, RoundPhase.VERIFIED)
    late = [m for m in run.members if not _in(states, m, *ready)]
    if not late:
        return _to_phase(draft, run, "transfer")
    if draft.now > run.phase_since + limits.prepare + draft.settings.grace:
        _fail_late(draft, run, late, f"not ready for a transfer after {limits.prepare} s")
        return None
    for member in late:
        if states[member.uid] is None:
            draft.send(
                member,
                "prepare",
                Prepare,
                epoch=run.epoch,
                round=run.number,
                version=run.version,
                sequence=run.sequence,
                deadline_seconds=limits.prepare,
                # Later than our own last moment by what one answer may take.
                decide_by_seconds=run.decide_by - run.started + limits.commit / 2,
                flip=run.policy,
            )
    return None


def _transfer(draft: Draft, run: RoundRun, states: States) -> RoundRun | None:
    limits = draft.spec.limits
    late = [m for m in run.members if not _in(states, m, RoundPhase.VERIFIED)]
    if not late:
        inference = [m for m in run.members if m.role == ROLE_INFERENCE]
        took = [s.seconds for s in states.values() if s is not None and s.seconds is not None]
        measured = replace(
            run,
            seconds=max(took, default=None),
            bytes_total=sum(s.bytes_total for m in inference if (s := states[m.uid]) is not None),
            content=next((s.content for s in states.values() if s is not None and s.content), ""),
        )
        return _to_phase(draft, measured, "halt" if run.barrier else "confirm")
    if draft.now > run.phase_since + limits.transfer + draft.settings.grace:
        _fail_late(draft, run, late, f"transfer not verified after {limits.transfer} s")
        return None
    for member in late:
        if _in(states, member, RoundPhase.READY):
            draft.send(
                member,
                "transfer",
                Transfer,
                epoch=run.epoch,
                round=run.number,
                deadline_seconds=limits.transfer,
            )
    return None


def _confirm(draft: Draft, run: RoundRun, states: States) -> None:
    """Each must say it again, in an answer to a question asked after the last one said it first; then it is decided."""
    unsure = [
        m
        for m in run.members
        if not _in(states, m, RoundPhase.VERIFIED) or draft.pods[m.uid].agent.asof < run.phase_since
    ]
    if run.barrier and _moving(draft, run):
        # Not what it was: a container that restarted, a pod that came. Nothing is decided past it.
        _halt(draft, _to_phase(draft, run, "halt"))
    elif draft.now > _decide_by(draft, run):
        _fail_late(draft, run, unsure or list(run.members), "verified, but not confirmed in time")
    elif unsure:
        draft.reads.extend(m.uid for m in unsure)
    else:
        decision = DecisionFact(
            epoch=run.epoch,
            round=run.number,
            version=run.version,
            run_id=run.run_id,
            sequence=run.sequence,
            members=run.members,
            earlier=_earlier(draft, run.version),
        )
        draft.record = draft.facts.model_copy(update={"decision": decision})


def _earlier(draft: Draft, version: str) -> tuple[str, ...]:
    """What was served before this version."""
    before = draft.facts.decision
    if before is None:
        return ()
    served = (before.version, *before.earlier)
    return tuple(dict.fromkeys(one for one in served if one != version))[:MAX_EARLIER]


def _decide_by(draft: Draft, run: RoundRun) -> float:
    """Who stands still does not stand so for ever, whatever keeps us from deciding."""
    if run.halting_since is None:
        return run.decide_by
    return min(run.decide_by, run.halting_since + draft.spec.limits.commit + draft.settings.grace)


def _moving(draft: Draft, run: RoundRun) -> list[Pod]:
    return [pod for pod in draft.seen.pods if may_generate(pod, draft.facts.term, run.number)]


def _halt(draft: Draft, run: RoundRun) -> bool:
    """Whether nobody generates any more. Pods beside the round come first, at no cost to its members: one that
    cannot be reached keeps nobody from serving, only the version from going live."""
    moving = _moving(draft, run)
    members = {(m.uid, m.boot_id) for m in run.members}
    beside = [pod for pod in moving if (pod.uid, _boot(pod)) not in members]
    late = beside or moving
    if not late:
        return True
    if not beside and run.halting_since is None:
        run = replace(run, halting_since=draft.now)
        draft.memory = replace(draft.memory, round=run)
    limit = draft.spec.limits.commit
    if draft.now > _decide_by(draft, run):
        told = ", ".join(pod.name for pod in late[:5])
        why = "it takes no part in the round and may serve another version; delete it if it is dead"
        problem = Problem(
            reason=names.NOT_HALTED,
            message=f"pod {told}: has not halted for the barrier"
            f"{f' ({why})' if beside else f' within {limit} s'}{refusals(late)}"[:1000],
        )
        _fail(draft, run, problem, late[0].name, epoch_too=False)
        return False
    for pod in late:
        state = pod.agent.state
        if state is not None:
            request = Halt(
                boot_id=state.boot_id,
                object_uid=draft.seen.uid,
                term=draft.facts.term,
                epoch=run.epoch,
                round=run.number,
                deadline_seconds=min(2 * limit, MAX_SECONDS),
            )
            draft.sends.append(Send(pod.name, pod.uid, "halt", request))
    return False


def _to_phase(draft: Draft, run: RoundRun, phase: Literal["transfer", "halt", "confirm"]) -> RoundRun:
    run = replace(run, phase=phase, phase_since=draft.now)
    draft.memory = replace(draft.memory, round=run)
    return run


def _is_lost(draft: Draft, run: RoundRun, states: States) -> bool:
    """Fails the round when any member cannot finish it. The best account of the cause wins."""
    verified = all(state is not None and state.phase is RoundPhase.VERIFIED for state in states.values())
    for member in run.members:
        how = draft.gone(member) or draft.silent(member)
        if not how and draft.pods[member.uid].terminating and not verified:
            how = "is being deleted"
        if how:
            _fail(
                draft,
                run,
                Problem(
                    reason=names.MEMBER_SILENT if draft.silent(member) else names.MEMBER_GONE,
                    message=f"pod {member.pod} {how}",
                ),
                member.pod,
                epoch_too=True,
            )
            return True
    told: list[tuple[MemberIdentity, Problem, bool]] = []
    for member in run.members:
        in_epoch = epoch_state(draft.state(member), member, draft.facts.term, run.epoch)
        state = states[member.uid]
        if in_epoch is None:
            # The answer to `prepare` and later states must know the epoch; a lost one is a failure.
            told.append((member, Problem(reason=names.EPOCH_FAILED, message="has forgotten the epoch"), True))
        elif in_epoch.phase is EpochPhase.FAILED:
            told.append((member, in_epoch.problem or unexplained(), True))
        elif state is not None and state.phase in (RoundPhase.FAILED, RoundPhase.ABORTED):
            told.append((member, state.problem or unexplained(), False))
    if not told:
        return False
    member, problem, _ = min(told, key=lambda item: item[1].rank is None)
    culprit = pod_of_rank(run.members, problem.rank) or member.pod
    _fail(draft, run, problem, culprit, epoch_too=any(lost for _, _, lost in told))
    return True


def _fail_late(draft: Draft, run: RoundRun, late: list[MemberIdentity], what: str) -> None:
    _fail(
        draft,
        run,
        Problem(
            reason=names.DEADLINE_EXCEEDED,
            message=f"pod {pods_in_words(late)}: {what}{draft.refusals(late)}"[:1000],
        ),
        late[0].pod,
        epoch_too=True,
    )


def _fail(draft: Draft, run: RoundRun, problem: Problem, culprit: str, *, epoch_too: bool) -> None:
    message = problem.message if culprit in problem.message else f"pod {culprit}: {problem.message}"
    backoff = draft.backoff(draft.memory.round_backoff, (draft.roster.fingerprint, run.version))
    report = RoundReport(
        number=run.number,
        version=run.version,
        outcome="Aborted",
        finished_at=stamp(draft.seen.wall),
        culprit=culprit,
        reason=problem.reason,
        message=message,
    )
    past = draft.memory.rounds
    if past and (past[0].outcome, past[0].version, past[0].reason, past[0].culprit) == (
        "Aborted",
        run.version,
        problem.reason,
        culprit,
    ):
        # The same again: counted, so that the last good round stays on the list.
        report = report.model_copy(update={"attempts": past[0].attempts + 1})
        past = past[1:]
    cause = f"{culprit}/{problem.reason}"
    told = f"version {run.version}: {message} ({problem.reason})"
    draft.event("Warning", names.ROUND_FAILED, told, cause)
    draft.memory = replace(
        draft.memory,
        round=None,
        rounds=(report, *past)[:MAX_ROUNDS],
        round_backoff=backoff,
        failure=Failure("round", problem.reason, message, culprit, run.version, backoff.failures, draft.now),
        aborted=(run.epoch, run.number, problem),
        epoch=None if epoch_too else draft.memory.epoch,
    )


def _boot(pod: Pod) -> str:
    return pod.agent.state.boot_id if pod.agent.state is not None else ""
