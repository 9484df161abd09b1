"""Questions that the planner, the conditions and the status ask alike."""

from __future__ import annotations

import ipaddress

from weightsync_engine.protocol.messages import (
    AgentState,
    EpochState,
    InferenceFacts,
    Published,
    RoundPhase,
    RoundState,
)
from weightsync_engine.protocol.names import ROLE_INFERENCE

from ...api.types import Facts, MemberIdentity, RoundReport, WeightSyncSpec
from ..members import Member, Pod, Roster
from .values import Memory, Observed, Settings

ALIKE_VERSIONS = 3
"""So many versions in a row with the same weights, and training does not arrive."""


def committed_version(facts: Facts) -> str | None:
    """The version that the fleet serves: of the newest decision, finished or not."""
    return facts.decision.version if facts.decision else None


def holds(inference: InferenceFacts, facts: Facts, spec: WeightSyncSpec) -> bool:
    """Whether a pod's live weights are what the fleet serves."""
    if inference.torn:
        return False
    version = committed_version(facts)
    if version is None:
        return not spec.closed_before_first_version
    return inference.live_version == version


def committing(memory: Memory, observed: Observed, member: Member, settings: Settings) -> bool:
    """Whether this pod is between decision and flip, and still within its time."""
    run = memory.round
    return (
        run is not None
        and run.phase == "commit"
        and any((m.uid, m.boot_id) == member.key for m in run.members)
        and observed.now <= run.phase_since + observed.spec.limits.commit + settings.grace
    )


def serves(memory: Memory, observed: Observed, member: Member, settings: Settings) -> bool:
    """Whether this inference pod counts as in sync: it serves what the fleet serves, or is just flipping to
    it."""
    facts = member.state.inference
    if facts is None or not facts.serving:
        return False
    return holds(facts, observed.facts, observed.spec) or committing(memory, observed, member, settings)


UNCHANGED = (
    "the last versions had the same weights, bit for bit: look whether the optimizer steps, and whether the model "
    "that is trained is the one that is published"
)
"""The same for every version, so that repetitions are counted in one event."""


def unchanged(report: RoundReport | None) -> bool:
    """Whether so many versions in a row had the same weights that it is worth a warning."""
    return report is not None and report.alike >= ALIKE_VERSIONS


def published(roster: Roster) -> Published | None:
    """The version that every trainer pod holds; None while they differ or before the first."""
    seen = {member.state.trainer.published if member.state.trainer else None for member in roster.trainers}
    return seen.pop() if len(seen) == 1 else None


def target(observed: Observed, roster: Roster) -> Published | None:
    """The version that a round should bring now; None when nothing is to be done or it is not to be had."""
    have, decision, wanted = published(roster), observed.facts.decision, observed.spec.wanted_version
    if have is None or (wanted is not None and have.version != wanted):
        return None
    if decision is None:
        return have
    if wanted is None:
        if decision.run_id != roster.run_id or have.sequence > decision.sequence:
            return have
    elif decision.version != wanted:
        return have if refused_rollback(observed, roster) is None else None
    behind = any(
        member.state.inference and not holds(member.state.inference, observed.facts, observed.spec)
        for member in roster.inference
    )
    return have if behind and have.version == decision.version else None


def refused_rollback(observed: Observed, roster: Roster) -> str | None:
    """The version that the spec asks for, where it came before the served one and the spec does not allow that."""
    have, decision, wanted = published(roster), observed.facts.decision, observed.spec.wanted_version
    if decision is None or wanted is None or wanted == decision.version or observed.spec.rollback_allowed:
        return None
    older = (
        have is not None
        and have.version == wanted
        and decision.run_id == roster.run_id
        and have.sequence < decision.sequence
    )
    return wanted if older or wanted in decision.earlier else None


def may_generate(pod: Pod, term: int, number: int) -> bool:
    """Whether this inference pod is not known to have halted for a round. Also one that cannot be reached, whatever it
    said last: it may have been admitted since."""
    state = pod.agent.state
    if pod.role != ROLE_INFERENCE or pod.phase in ("Succeeded", "Failed", "Pending"):
        return False
    if state is None:
        # Starts closed, and no operator opens what never answered; but an earlier one may have heard of it.
        return pod.containers_ready or (pod.gate is not None and pod.gate.status)
    halted = state.inference.halted if state.inference is not None else None
    return halted is None or (halted.term, halted.round) != (term, number)


def epoch_state(
    state: AgentState | None, identity: MemberIdentity, term: int, epoch: int
) -> EpochState | None:
    """The member's own word on this epoch; None when it knows nothing of it."""
    if state is None or state.boot_id != identity.boot_id or state.epoch is None:
        return None
    return state.epoch if (state.epoch.term, state.epoch.epoch) == (term, epoch) else None


def round_state(
    state: AgentState | None, identity: MemberIdentity, epoch: int, number: int
) -> RoundState | None:
    """The member's own word on this round; None when it knows nothing of it."""
    if state is None or state.boot_id != identity.boot_id or state.round is None:
        return None
    return state.round if (state.round.epoch, state.round.round) == (epoch, number) else None


def usable_host(host: str, pod_ip: str) -> bool:
    """Whether peers on other nodes can reach an address that a pod of this address published."""
    if not host:
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # A short DNS name means another pod, or none, in another domain.
        return "." in host
    return not address.is_unspecified and (not address.is_loopback or host == pod_ip)


def flipping(state: RoundState) -> bool:
    """Told to commit and at it: nothing to repeat. With a problem the flip has ended, and may be tried
    again."""
    return state.phase is RoundPhase.COMMITTING and state.problem is None


def flip_failed(state: RoundState) -> bool:
    """The decision stands, and the pod is not in it."""
    return state.phase is RoundPhase.COMMITTING and state.problem is not None
