"""An epoch: begun with the members of the moment, joined by all of them, given up when one cannot."""

from __future__ import annotations

from dataclasses import replace

from weightsync_engine.protocol.messages import EpochPhase, EpochState, JoinEpoch, Problem, Rendezvous
from weightsync_engine.protocol.names import ROLE_INFERENCE

from ... import names
from ...api.types import EpochFact, MemberIdentity
from .draft import Draft, pod_of_rank, pods_in_words, unexplained
from .questions import epoch_state, usable_host
from .values import EpochRun, Failure


def begin(draft: Draft) -> None:
    """An epoch of whoever is there, once they have been the same for a while and the last failure's pause is over."""
    wait = draft.memory.membership_since + draft.settings.quiet - draft.now
    backoff = draft.memory.epoch_backoff
    if backoff is not None and backoff.key == draft.roster.fingerprint:
        wait = max(wait, backoff.until - draft.now)
    again = draft.memory.round_backoff
    if again is not None and isinstance(again.key, tuple) and again.key[0] == draft.roster.fingerprint:
        # After a failed round the agents first end what they were at.
        wait = max(wait, min(again.until, draft.now + draft.spec.retries.backoff) - draft.now)
    if wait > 0:
        draft.wake(wait)
        return
    failure = draft.memory.failure
    if failure is not None:
        # Whoever has not been heard since may be the cause: with it the next epoch would fail as well, and cost all
        # others their movers. One that goes on saying nothing is silent soon, and left out.
        unheard = [m for m in draft.roster.members if draft.pods[m.identity.uid].agent.asof < failure.at]
        if unheard:
            draft.reads.extend(m.identity.uid for m in unheard)
            draft.wake(draft.settings.tick)
            return
    number = max(draft.facts.epoch.number if draft.facts.epoch else 0, 0) + 1
    fact = EpochFact(number=number, members=tuple(m.identity for m in draft.roster.members))
    draft.memory = replace(
        draft.memory,
        epoch=EpochRun(fact, draft.seen.new_key, draft.now, transport=draft.spec.wire_transport),
    )
    draft.record = draft.facts.model_copy(update={"epoch": fact})


def advance(draft: Draft, epoch: EpochRun) -> None:
    """Until all have joined; and after that, whether it still stands."""
    if draft.facts.epoch != epoch.fact:
        draft.record = draft.facts.model_copy(update={"epoch": epoch.fact})
        return
    members = epoch.fact.members
    states = {m.uid: epoch_state(draft.state(m), m, draft.facts.term, epoch.fact.number) for m in members}
    lost = [m for m in members if draft.gone(m) or (m.uid in draft.pods and draft.pods[m.uid].terminating)]
    failed = [
        (m, state.problem or unexplained())
        for m in members
        if (state := states[m.uid]) is not None and state.phase is EpochPhase.FAILED
    ]
    aborted = draft.memory.aborted
    if failed and aborted is not None and aborted[0] == epoch.fact.number:
        # It went down with the round, whose failure is told and counted already.
        draft.memory = replace(draft.memory, epoch=None)
        return
    if failed and not lost:
        member, problem = min(failed, key=lambda item: item[1].rank is None)
        _fail(draft, epoch, problem, pod_of_rank(members, problem.rank) or member.pod)
        return
    if epoch.joined:
        forgot = [m for m in members if states[m.uid] is None and m not in lost and draft.state(m)]
        if forgot:
            problem = Problem(reason=names.EPOCH_FAILED, message="has forgotten the epoch")
            _fail(draft, epoch, problem, forgot[0].pod)
        return  # a lost member makes it stale, no more
    if lost:
        # Nobody's fault, and others wait for the lost one: begin again with who is there.
        draft.memory = replace(draft.memory, epoch=None)
        return
    for member in members:
        if how := draft.silent(member):
            # As in a round: whoever is known not to answer is not waited for to the end of the deadline.
            problem = Problem(reason=names.MEMBER_SILENT, message=f"pod {member.pod} {how}")
            _fail(draft, epoch, problem, member.pod)
            return
    draft.wake(draft.settings.tick)
    late = [m for m in members if (state := states[m.uid]) is None or state.phase is not EpochPhase.JOINED]
    if not late:
        _joined(draft, epoch, [state for state in states.values() if state is not None])
        return
    if draft.now > epoch.started + draft.spec.limits.join + draft.settings.grace:
        _fail(
            draft,
            epoch,
            Problem(
                reason=names.DEADLINE_EXCEEDED,
                message=f"pod {pods_in_words(late)}: has not joined after {draft.spec.limits.join} s"
                f"{draft.refusals(late)}"[:1000],
            ),
            late[0].pod,
        )
        return
    _join(draft, epoch, states)


def _join(draft: Draft, epoch: EpochRun, states: dict[str, EpochState | None]) -> None:
    members = epoch.fact.members
    lead = next(m for m in members if m.first_rank == 0)
    lead_pod = draft.pods[lead.uid]

    def send(member: MemberIdentity, rendezvous: Rendezvous | None) -> None:
        draft.send(
            member,
            "join",
            JoinEpoch,
            epoch=epoch.fact.number,
            first_rank=member.first_rank,
            world_size=sum(m.ranks for m in members),
            trainer_ranks=sum(m.ranks for m in members if m.role != ROLE_INFERENCE),
            rendezvous=rendezvous,
            key=epoch.key,
            lead_agent=Rendezvous(host=lead_pod.ip, port=lead_pod.port),
            transport=epoch.transport,
            deadline_seconds=draft.spec.limits.join,
        )

    lead_state = states[lead.uid]
    if lead_state is None:
        send(lead, None)
        return
    rendezvous = lead_state.rendezvous
    if rendezvous is None:
        return
    if not usable_host(rendezvous.host, lead_pod.ip):
        _fail(
            draft,
            epoch,
            Problem(
                reason=names.BAD_RENDEZVOUS,
                message=f"published {rendezvous.host!r} as the address of the store, which other "
                "pods cannot "
                "reach; set WEIGHTSYNC_POD_IP in it by the downward API",
            ),
            lead.pod,
        )
        return
    for member in members:
        if states[member.uid] is None:
            send(member, rendezvous)


def _joined(draft: Draft, epoch: EpochRun, states: list[EpochState]) -> None:
    lead = next(m for m in epoch.fact.members if m.first_rank == 0)
    digests = {state.plan.digest if state.plan else "" for state in states}
    if len(digests) > 1 or "" in digests:
        problem = Problem(
            reason=names.PLANS_DIFFER,
            message="the members computed different plans; run one version of weightsync in all pods",
        )
        _fail(draft, epoch, problem, lead.pod)
        return
    summary = states[0].plan
    if summary is None or summary.parameters == 0:
        problem = Problem(
            reason=names.ZERO_PARAMETERS,
            message="the trainer has no parameters to send; give Publisher the model whose weights "
            "are served",
        )
        _fail(draft, epoch, problem, lead.pod)
        return
    if summary.rounded:
        draft.event("Warning", names.EVENT_PRECISION_LOST, summary.rounding)
    failure = draft.memory.failure
    draft.memory = replace(
        draft.memory,
        epoch=replace(epoch, plan=summary, joined=True),
        epoch_backoff=None,
        failure=None if failure is not None and failure.what == "epoch" else failure,
    )


def _fail(draft: Draft, epoch: EpochRun, problem: Problem, culprit: str) -> None:
    message = problem.message if culprit in problem.message else f"pod {culprit}: {problem.message}"
    backoff = draft.backoff(draft.memory.epoch_backoff, epoch.keys)
    cause = f"{culprit}/{problem.reason}"
    draft.event("Warning", names.EPOCH_FAILED, f"{message} ({problem.reason})", cause)
    draft.memory = replace(
        draft.memory,
        epoch=None,
        epoch_backoff=backoff,
        failure=Failure("epoch", problem.reason, message, culprit, failures=backoff.failures, at=draft.now),
    )
