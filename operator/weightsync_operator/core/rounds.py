"""The planner: what is durable, remembered and seen now -> what to record, send and show next.

`plan` is called again and again with whatever is true at that moment (level-triggered): it repeats a
request until the agent's own state shows its effect, so lost answers, duplicate events and restarts change
nothing but latency.

Order of things that must never break:

* Nothing is sent for an epoch before `Facts.epoch` holds it, no commit before `Facts.decision` holds the
  round. When a plan asks for facts, its caller records them (with a precondition) before it calls `plan`
  again.
* A decision needs every member's VERIFIED in an answer to a request that was sent after all were seen
verified.
* With a barrier, no decision before every pod that may generate has confirmed that it has halted for the round, and no
pod is admitted between.
* An unfinished decision is rolled forward by every operator; any other unfinished round is aborted.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from weightsync_engine.protocol.messages import (
    DEFAULT_FLIP,
    Abort,
    Addressed,
    Admit,
    AgentState,
    Commit,
    EpochPhase,
    EpochState,
    Fence,
    FlipPolicy,
    Halt,
    InferenceFacts,
    JoinEpoch,
    PlanSummary,
    Prepare,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
    RoundState,
    Transfer,
)
from weightsync_engine.protocol.names import ROLE_INFERENCE

from .. import names
from ..api.types import (
    MAX_EARLIER,
    MAX_ROUNDS,
    DecisionFact,
    EpochFact,
    Facts,
    MemberIdentity,
    RoundReport,
    WeightSyncSpec,
)
from .members import SILENT_AFTER, Gate, Member, Pod, Remark, Roster, resolve

MAX_SECONDS = 86400.0
"""The longest time that a message can carry."""

ALIKE_VERSIONS = 3
"""So many versions in a row with the same weights, and training does not arrive."""

_ENDED = (RoundPhase.COMMITTED, RoundPhase.ABORTED, RoundPhase.FAILED)


@dataclass(frozen=True)
class Settings:
    """Times in seconds that are ours, not the user's."""

    quiet: float = 0.5
    """A membership is left alone this long before an epoch is built of it: pods that come together need one epoch. Who
    comes later waits for the next one, and every recovery waits for this."""
    grace: float = 5.0
    """Added to the agents' own deadlines, so that their more exact message wins."""
    lead_wait: float = 2.0
    """How long the commit waits for the lead's agent to mirror the decision before it goes to all."""
    tick: float = 1.0
    """Longest pause between two looks while something is under way."""
    resync: float = 60.0
    """Longest pause while nothing is."""


@dataclass(frozen=True)
class Failure:
    """The newest failure that has not been overcome."""

    what: Literal["epoch", "round"]
    reason: str
    message: str
    culprit: str = ""
    version: str = ""
    failures: int = 1
    """In a row."""
    at: float = float("-inf")


@dataclass(frozen=True)
class Backoff:
    """When to try again what failed with the same members (and version)."""

    key: object
    failures: int
    until: float


@dataclass(frozen=True)
class EpochRun:
    """The epoch as this operator process knows it: its key is in no other place."""

    fact: EpochFact
    key: str = field(repr=False)
    started: float
    transport: Literal["auto", "gloo", "nccl_m2n", "nccl_p2p"] = "auto"
    plan: PlanSummary | None = None
    """Set once all members have joined with the same plan."""
    joined: bool = False

    @property
    def keys(self) -> frozenset[tuple[str, str]]:
        return frozenset((member.uid, member.boot_id) for member in self.fact.members)


@dataclass(frozen=True)
class RoundRun:
    """The round under way. Its members are frozen: only they can be promoted by it."""

    epoch: int
    number: int
    version: str
    run_id: str
    sequence: int
    members: tuple[MemberIdentity, ...]
    phase: Literal["prepare", "transfer", "halt", "confirm", "commit"]
    started: float
    phase_since: float
    decide_by: float
    policy: FlipPolicy = DEFAULT_FLIP
    barrier: bool = False
    """No pod may generate with another version once the first one flips."""
    halting_since: float | None = None
    """When the first member was told to halt."""
    seconds: float | None = None
    bytes_total: int = 0
    content: str = ""
    rolled_forward: bool = False


@dataclass(frozen=True)
class Memory:
    """What this operator process remembers of one object. Losing it costs an epoch, never an answer."""

    epoch: EpochRun | None = None
    round: RoundRun | None = None
    next_round: int = 1
    rounds: tuple[RoundReport, ...] = ()
    """Newest first."""
    last_committed: RoundReport | None = None
    membership: frozenset[tuple[str, str]] = frozenset()
    membership_since: float = float("-inf")
    epoch_backoff: Backoff | None = None
    round_backoff: Backoff | None = None
    failure: Failure | None = None
    aborted: tuple[int, int, Problem] | None = None
    """Epoch, round and cause of the round that was given up last."""
    noted: frozenset[tuple[str, str]] = frozenset()
    """(pod, reason) of the remarks that an event has told."""


@dataclass(frozen=True)
class Observed:
    """What is true now. Times are monotonic seconds, but for `wall`."""

    uid: str
    generation: int
    spec: WeightSyncSpec
    facts: Facts
    pods: tuple[Pod, ...]
    now: float
    wall: datetime.datetime
    new_key: str
    """A fresh secret, used when an epoch begins."""


@dataclass(frozen=True)
class Send:
    """One request to the process of one pod."""

    pod: str
    uid: str
    verb: str
    request: Addressed


@dataclass(frozen=True)
class GateChange:
    pod: str
    uid: str
    status: bool
    reason: str
    message: str


@dataclass(frozen=True)
class EventNote:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    cause: str = ""
    """Who or what is behind it. With type and reason it tells whether this is the same again, whose message may
    still differ in its figures: then it is counted, and not told more than once a minute."""


@dataclass(frozen=True)
class Plan:
    """What to do now, in this order: record `facts`; if that is None, send and read; show the rest."""

    memory: Memory
    roster: Roster
    facts: Facts | None = None
    sends: tuple[Send, ...] = ()
    reads: tuple[str, ...] = ()
    """UIDs of the pods whose agents must be asked afresh."""
    gates: tuple[GateChange, ...] = ()
    events: tuple[EventNote, ...] = ()
    wake_in: float = 60.0


def plan(memory: Memory, observed: Observed, settings: Settings = Settings()) -> Plan:  # noqa: B008 (frozen)
    """Decides the next step of one object."""
    return _Planner(memory, observed, settings).run()


# ---- questions that planner, conditions and report ask alike -----------------------------------------------


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


def _pods(identities: Iterable[MemberIdentity]) -> str:
    told = [identity.pod for identity in identities]
    return ", ".join(told[:5]) + (f" and {len(told) - 5} more" if len(told) > 5 else "")


class _Planner:
    """Builds one plan; lives for one call."""

    def __init__(self, memory: Memory, observed: Observed, settings: Settings) -> None:
        self.memory = memory
        self.seen = observed = replace(
            observed, pods=tuple(_without_others(pod, observed.uid) for pod in observed.pods)
        )
        self.settings = settings
        self.now = observed.now
        self.facts = observed.facts
        self.spec = observed.spec
        self.pods = {pod.uid: pod for pod in observed.pods}
        self.roster = resolve(observed.pods, observed.now, observed.spec.min_members)
        self.record: Facts | None = None
        self.sends: list[Send] = []
        self.reads: list[str] = []
        self.gates: list[GateChange] = []
        self.events: list[EventNote] = []
        self.wake_in = settings.resync

    def run(self) -> Plan:
        self._note_membership()
        self._note_remarks()
        self._roll_forward()
        if self.memory.round is not None:
            self._advance_round(self.memory.round)
        # Not `else`: a round that just ended may make room for the next step at once.
        if self.memory.round is None and self.record is None:
            if self.memory.epoch is not None:
                self._advance_epoch(self.memory.epoch)
            self._start_something()
        if self.record is None:
            self._end_strays()
            self._tell_trainers()
            self._admit_or_fence()
            self._set_gates()
            self._watch_silence()
        else:
            self.sends, self.reads, self.wake_in = [], [], 0.0
        return Plan(
            self.memory,
            self.roster,
            self.record,
            tuple(self.sends),
            tuple(self.reads),
            tuple(self.gates),
            tuple(self.events),
            self.wake_in,
        )

    # ---- small helpers -------------------------------------------------------------------------------------

    def _wake(self, seconds: float) -> None:
        self.wake_in = max(0.05, min(self.wake_in, seconds))

    def _state(self, identity: MemberIdentity) -> AgentState | None:
        """The newest state of exactly this process; None when another one, or nobody, is known there."""
        pod = self.pods.get(identity.uid)
        state = pod.agent.state if pod else None
        return state if state is not None and state.boot_id == identity.boot_id else None

    def _gone(self, identity: MemberIdentity) -> str:
        """How this process has ended for good; empty while it may be alive."""
        pod = self.pods.get(identity.uid)
        if pod is None:
            return "is deleted"
        if pod.phase in ("Succeeded", "Failed"):
            return f"has ended ({pod.phase})"
        if pod.agent.state is not None and pod.agent.state.boot_id != identity.boot_id:
            return "has restarted"
        return ""

    def _silent(self, identity: MemberIdentity) -> str:
        """Why this process counts as silent; empty while it answers."""
        pod = self.pods.get(identity.uid)
        error = pod.agent.error if pod else None
        if error is not None and self.now - error.since >= SILENT_AFTER:
            return f"has not answered for {SILENT_AFTER:.0f} s ({error.message})"
        return ""

    def _send(
        self, identity: MemberIdentity, verb: str, make: Callable[..., Addressed], **fields: object
    ) -> None:
        request = make(boot_id=identity.boot_id, object_uid=self.seen.uid, term=self.facts.term, **fields)
        self.sends.append(Send(identity.pod, identity.uid, verb, request))

    def _send_to(self, member: Member, verb: str, make: Callable[..., Addressed], **fields: object) -> None:
        self._send(member.identity, verb, make, **fields)

    def _event(self, kind: Literal["Normal", "Warning"], reason: str, message: str, cause: str = "") -> None:
        self.events.append(EventNote(kind, reason, message, cause))

    def _refusals(self, identities: Iterable[MemberIdentity]) -> str:
        told = [
            f"{identity.pod}: {pod.agent.refusal}"
            for identity in identities
            if (pod := self.pods.get(identity.uid)) is not None and pod.agent.refusal
        ]
        return f" ({'; '.join(told[:3])})" if told else ""

    @staticmethod
    def _refusals_of(pods: Iterable[Pod]) -> str:
        told = [f"{pod.name}: {pod.agent.refusal}" for pod in pods if pod.agent.refusal]
        return f" ({'; '.join(told[:3])})" if told else ""

    def _backoff(self, before: Backoff | None, key: object) -> Backoff:
        failures = before.failures + 1 if before is not None and before.key == key else 1
        retry = self.spec.retries
        pause = min(retry.backoff * 2.0 ** min(failures - 1, 16), retry.max_backoff)
        return Backoff(key, failures, self.now + pause)

    # ---- what is noticed first -----------------------------------------------------------------------------

    def _note_membership(self) -> None:
        if self.roster.fingerprint != self.memory.membership or self.memory.membership_since == float("-inf"):
            self.memory = replace(self.memory, membership=self.roster.fingerprint, membership_since=self.now)

    def _note_remarks(self) -> None:
        """One event for each thing that is wrong with a pod; a server that is still starting is not wrong."""
        worth: list[Remark] = [
            remark
            for remark in self.roster.remarks
            if not remark.expected and remark.reason not in names.STARTING
        ]
        for remark in worth:
            if (remark.pod, remark.reason) not in self.memory.noted:
                self._event("Warning", remark.reason, remark.message, remark.pod)
        self.memory = replace(self.memory, noted=frozenset((remark.pod, remark.reason) for remark in worth))

    def _roll_forward(self) -> None:
        decision, running = self.facts.decision, self.memory.round
        if decision is None:
            return
        # Numbers of rounds only grow, over restarts too: what an operator remembers begins anew, the record does not.
        self.memory = replace(self.memory, next_round=max(self.memory.next_round, decision.round + 1))
        if decision.finished:
            return
        if running is not None and running.number == decision.round:
            if running.phase != "commit":
                self.memory = replace(
                    self.memory, round=replace(running, phase="commit", phase_since=self.now)
                )
            return
        self._event(
            "Normal",
            names.EVENT_ROLLED_FORWARD,
            f"version {decision.version} was decided before this operator started; it is committed now",
        )
        self.memory = replace(
            self.memory,
            round=RoundRun(
                epoch=decision.epoch,
                number=decision.round,
                version=decision.version,
                run_id=decision.run_id,
                sequence=decision.sequence,
                members=decision.members,
                phase="commit",
                started=self.now,
                phase_since=self.now,
                decide_by=self.now,
                rolled_forward=True,
            ),
        )

    # ---- a round -------------------------------------------------------------------------------------------

    def _advance_round(self, run: RoundRun) -> None:
        self._wake(self.settings.tick)
        if run.phase == "commit":
            self._commit(run)
            return
        states = {m.uid: round_state(self._state(m), m, run.epoch, run.number) for m in run.members}
        if self._round_is_lost(run, states):
            return
        phases = {uid: state.phase if state else None for uid, state in states.items()}
        limits, grace = self.spec.limits, self.settings.grace
        if run.phase == "prepare":
            ready = (RoundPhase.READY, RoundPhase.TRANSFERRING, RoundPhase.VERIFIED)
            late = [m for m in run.members if phases[m.uid] not in ready]
            if late:
                if self.now > run.phase_since + limits.prepare + grace:
                    self._fail_late(run, late, f"not ready for a transfer after {limits.prepare} s")
                    return
                for member in late:
                    if phases[member.uid] is None:
                        self._send(
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
                return
            run = self._to_phase(run, "transfer")
        if run.phase == "transfer":
            late = [m for m in run.members if phases[m.uid] is not RoundPhase.VERIFIED]
            if late:
                if self.now > run.phase_since + limits.transfer + grace:
                    self._fail_late(run, late, f"transfer not verified after {limits.transfer} s")
                    return
                for member in late:
                    if phases[member.uid] is RoundPhase.READY:
                        self._send(
                            member,
                            "transfer",
                            Transfer,
                            epoch=run.epoch,
                            round=run.number,
                            deadline_seconds=limits.transfer,
                        )
                return
            inference = [m for m in run.members if m.role == ROLE_INFERENCE]
            took = [s.seconds for s in states.values() if s is not None and s.seconds is not None]
            run = replace(
                self._to_phase(run, "halt" if run.barrier else "confirm"),
                seconds=max(took, default=None),
                bytes_total=sum(s.bytes_total for m in inference if (s := states[m.uid]) is not None),
                content=next((s.content for s in states.values() if s is not None and s.content), ""),
            )
            self.memory = replace(self.memory, round=run)
        if run.phase == "halt":
            if not self._halt(run):
                return
            run = self._to_phase(run, "confirm")
        # confirm: each must say it again, in an answer to a question asked after the last one said it first.
        unsure = [
            m
            for m in run.members
            if phases[m.uid] is not RoundPhase.VERIFIED or self.pods[m.uid].agent.asof < run.phase_since
        ]
        moving = self._moving(run) if run.barrier else []
        if moving:
            # Not what it was: a container that restarted, a pod that came. Nothing is decided past it.
            run = self._to_phase(run, "halt")
            self._halt(run)
        elif self.now > self._decide_by(run):
            self._fail_late(run, unsure or list(run.members), "verified, but not confirmed in time")
        elif unsure:
            self.reads.extend(m.uid for m in unsure)
        else:
            self.record = self.facts.model_copy(
                update={
                    "decision": DecisionFact(
                        epoch=run.epoch,
                        round=run.number,
                        version=run.version,
                        run_id=run.run_id,
                        sequence=run.sequence,
                        members=run.members,
                        earlier=self._earlier(run.version),
                    )
                }
            )

    def _earlier(self, version: str) -> tuple[str, ...]:
        """What was served before this version."""
        before = self.facts.decision
        if before is None:
            return ()
        served = (before.version, *before.earlier)
        return tuple(dict.fromkeys(one for one in served if one != version))[:MAX_EARLIER]

    def _decide_by(self, run: RoundRun) -> float:
        """Who stands still does not stand so for ever, whatever keeps us from deciding."""
        if run.halting_since is None:
            return run.decide_by
        return min(run.decide_by, run.halting_since + self.spec.limits.commit + self.settings.grace)

    def _moving(self, run: RoundRun) -> list[Pod]:
        return [pod for pod in self.seen.pods if may_generate(pod, self.facts.term, run.number)]

    def _halt(self, run: RoundRun) -> bool:
        """Whether nobody generates any more. Pods beside the round come first, at no cost to its members: one that
        cannot be reached keeps nobody from serving, only the version from going live."""
        moving = self._moving(run)
        members = {(m.uid, m.boot_id) for m in run.members}
        beside = [pod for pod in moving if (pod.uid, _boot(pod)) not in members]
        late = beside or moving
        if not late:
            return True
        if not beside and run.halting_since is None:
            run = replace(run, halting_since=self.now)
            self.memory = replace(self.memory, round=run)
        limit = self.spec.limits.commit
        if self.now > self._decide_by(run):
            told = ", ".join(pod.name for pod in late[:5])
            why = "it takes no part in the round and may serve another version; delete it if it is dead"
            problem = Problem(
                reason=names.NOT_HALTED,
                message=f"pod {told}: has not halted for the barrier"
                f"{f' ({why})' if beside else f' within {limit} s'}{self._refusals_of(late)}"[:1000],
            )
            self._fail_round(run, problem, late[0].name, epoch_too=False)
            return False
        for pod in late:
            state = pod.agent.state
            if state is not None:
                request = Halt(
                    boot_id=state.boot_id,
                    object_uid=self.seen.uid,
                    term=self.facts.term,
                    epoch=run.epoch,
                    round=run.number,
                    deadline_seconds=min(2 * limit, MAX_SECONDS),
                )
                self.sends.append(Send(pod.name, pod.uid, "halt", request))
        return False

    def _to_phase(self, run: RoundRun, phase: Literal["transfer", "halt", "confirm"]) -> RoundRun:
        run = replace(run, phase=phase, phase_since=self.now)
        self.memory = replace(self.memory, round=run)
        return run

    def _round_is_lost(self, run: RoundRun, states: dict[str, RoundState | None]) -> bool:
        """Fails the round when any member cannot finish it. The best account of the cause wins."""
        verified = all(state is not None and state.phase is RoundPhase.VERIFIED for state in states.values())
        for member in run.members:
            how = self._gone(member) or self._silent(member)
            if not how and self.pods[member.uid].terminating and not verified:
                how = "is being deleted"
            if how:
                self._fail_round(
                    run,
                    Problem(
                        reason=names.MEMBER_SILENT if self._silent(member) else names.MEMBER_GONE,
                        message=f"pod {member.pod} {how}",
                    ),
                    member.pod,
                    epoch_too=True,
                )
                return True
        told: list[tuple[MemberIdentity, Problem, bool]] = []
        for member in run.members:
            in_epoch = epoch_state(self._state(member), member, self.facts.term, run.epoch)
            state = states[member.uid]
            if in_epoch is None:
                # The answer to `prepare` and later states must know the epoch; a lost one is a failure.
                told.append(
                    (member, Problem(reason=names.EPOCH_FAILED, message="has forgotten the epoch"), True)
                )
            elif in_epoch.phase is EpochPhase.FAILED:
                told.append((member, in_epoch.problem or _unexplained(), True))
            elif state is not None and state.phase in (RoundPhase.FAILED, RoundPhase.ABORTED):
                told.append((member, state.problem or _unexplained(), False))
        if not told:
            return False
        member, problem, _ = min(told, key=lambda item: item[1].rank is None)
        culprit = self._pod_of_rank(run.members, problem.rank) or member.pod
        self._fail_round(run, problem, culprit, epoch_too=any(lost for _, _, lost in told))
        return True

    @staticmethod
    def _pod_of_rank(members: Iterable[MemberIdentity], rank: int | None) -> str:
        if rank is None:
            return ""
        for member in members:
            if member.first_rank <= rank < member.first_rank + member.ranks:
                return member.pod
        return ""

    def _fail_late(self, run: RoundRun, late: list[MemberIdentity], what: str) -> None:
        self._fail_round(
            run,
            Problem(
                reason=names.DEADLINE_EXCEEDED,
                message=f"pod {_pods(late)}: {what}{self._refusals(late)}"[:1000],
            ),
            late[0].pod,
            epoch_too=True,
        )

    def _fail_round(self, run: RoundRun, problem: Problem, culprit: str, *, epoch_too: bool) -> None:
        message = problem.message if culprit in problem.message else f"pod {culprit}: {problem.message}"
        backoff = self._backoff(self.memory.round_backoff, (self.roster.fingerprint, run.version))
        report = RoundReport(
            number=run.number,
            version=run.version,
            outcome="Aborted",
            finished_at=_stamp(self.seen.wall),
            culprit=culprit,
            reason=problem.reason,
            message=message,
        )
        past = self.memory.rounds
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
        self._event("Warning", names.ROUND_FAILED, told, cause)
        self.memory = replace(
            self.memory,
            round=None,
            rounds=(report, *past)[:MAX_ROUNDS],
            round_backoff=backoff,
            failure=Failure(
                "round", problem.reason, message, culprit, run.version, backoff.failures, self.now
            ),
            aborted=(run.epoch, run.number, problem),
            epoch=None if epoch_too else self.memory.epoch,
        )

    def _commit(self, run: RoundRun) -> None:
        """After the decision there is no way back: told until each member has it or is kept from serving."""
        decision = self.facts.decision
        if decision is None or decision.round != run.number:
            raise RuntimeError(f"round {run.number} commits without a recorded decision")
        if decision.finished:
            self._finish(run)
            return
        overdue = self.now > run.phase_since + self.spec.limits.commit + self.settings.grace
        undone = [m for m in run.members if not self._done(m, run, overdue)]
        if not undone:
            self.record = self.facts.model_copy(
                update={"decision": decision.model_copy(update={"finished": True})}
            )
            return
        lead = [m for m in undone if m.first_rank == 0]
        lead_first = lead and self.now < run.phase_since + self.settings.lead_wait
        for member in lead if lead_first else undone:
            in_round = round_state(self._state(member), member, run.epoch, run.number)
            if in_round is not None and _flipping(in_round):
                continue
            if overdue and member.role == ROLE_INFERENCE:
                continue  # _admit_or_fence closes it
            self._send(
                member,
                "commit",
                Commit,
                epoch=run.epoch,
                round=run.number,
                version=run.version,
                deadline_seconds=self.spec.limits.commit,
            )

    def _done(self, member: MemberIdentity, run: RoundRun, overdue: bool) -> bool:
        """Whether nothing more is to be told to this member."""
        if self._gone(member):
            return True
        state = self._state(member)
        if member.role != ROLE_INFERENCE:
            if overdue:
                return True
            in_round = round_state(state, member, run.epoch, run.number)
            return (in_round is not None and in_round.phase is RoundPhase.COMMITTED) or (
                state is not None and state.trainer is not None and state.trainer.committed == run.version
            )
        if state is None or state.inference is None:
            return overdue
        if self._has_version(member, state, run):
            return True
        in_round = round_state(state, member, run.epoch, run.number)
        failed = in_round is not None and in_round.phase is RoundPhase.FAILED
        closed = not state.inference.serving
        return (closed and (failed or overdue)) or (overdue and bool(self._silent(member)))

    @staticmethod
    def _has_version(member: MemberIdentity, state: AgentState, run: RoundRun) -> bool:
        assert state.inference is not None
        in_round = round_state(state, member, run.epoch, run.number)
        if in_round is not None:
            return in_round.phase is RoundPhase.COMMITTED
        # An agent that lost the round but whose workers hold the version: the flip was done.
        return state.inference.live_version == run.version and not state.inference.torn

    def _finish(self, run: RoundRun) -> None:
        rate = run.bytes_total / run.seconds / 1e9 if run.seconds else None
        left = [
            m
            for m in run.members
            if m.role == ROLE_INFERENCE
            and ((state := self._state(m)) is None or not self._has_version(m, state, run))
        ]
        last, alike = self.memory.last_committed, 1
        if last is not None and run.content and last.content == run.content:
            alike = last.alike + (last.version != run.version)
        report = RoundReport(
            number=run.number,
            version=run.version,
            outcome="Committed",
            content=run.content,
            alike=alike,
            finished_at=_stamp(self.seen.wall),
            duration=f"{run.seconds:.2f}s" if run.seconds is not None else "",
            rate=f"{rate:.3g} GB/s" if rate else "",
            culprit=left[0].pod if left else "",
            reason=names.COMMIT_LATE if left else "",
            message=f"not live on {_pods(left)}, which is kept from serving" if left else "",
        )
        if left:
            self._event("Warning", names.COMMIT_LATE, f"version {run.version}: {report.message}")
        count = sum(m.role == ROLE_INFERENCE for m in run.members) - len(left)
        self._event(
            "Normal", names.EVENT_COMMITTED, f"version {run.version} is live on {count} inference pods"
        )
        if unchanged(report):
            self._event("Warning", names.PAYLOAD_UNCHANGED, UNCHANGED)
        self.memory = replace(
            self.memory,
            round=None,
            rounds=(report, *self.memory.rounds)[:MAX_ROUNDS],
            last_committed=report,
            round_backoff=None,
            failure=None,
        )

    # ---- an epoch ------------------------------------------------------------------------------------------

    def _advance_epoch(self, epoch: EpochRun) -> None:
        if self.facts.epoch != epoch.fact:
            self.record = self.facts.model_copy(update={"epoch": epoch.fact})
            return
        members = epoch.fact.members
        states = {m.uid: epoch_state(self._state(m), m, self.facts.term, epoch.fact.number) for m in members}
        lost = [m for m in members if self._gone(m) or (m.uid in self.pods and self.pods[m.uid].terminating)]
        failed = [
            (m, state.problem or _unexplained())
            for m in members
            if (state := states[m.uid]) is not None and state.phase is EpochPhase.FAILED
        ]
        aborted = self.memory.aborted
        if failed and aborted is not None and aborted[0] == epoch.fact.number:
            # It went down with the round, whose failure is told and counted already.
            self.memory = replace(self.memory, epoch=None)
            return
        if failed and not lost:
            member, problem = min(failed, key=lambda item: item[1].rank is None)
            self._fail_epoch(epoch, problem, self._pod_of_rank(members, problem.rank) or member.pod)
            return
        if epoch.joined:
            forgot = [m for m in members if states[m.uid] is None and m not in lost and self._state(m)]
            if forgot:
                problem = Problem(reason=names.EPOCH_FAILED, message="has forgotten the epoch")
                self._fail_epoch(epoch, problem, forgot[0].pod)
            return  # a lost member makes it stale, no more
        if lost:
            # Nobody's fault, and others wait for the lost one: begin again with who is there.
            self.memory = replace(self.memory, epoch=None)
            return
        for member in members:
            if how := self._silent(member):
                # As in a round: whoever is known not to answer is not waited for to the end of the deadline.
                problem = Problem(reason=names.MEMBER_SILENT, message=f"pod {member.pod} {how}")
                self._fail_epoch(epoch, problem, member.pod)
                return
        self._wake(self.settings.tick)
        late = [
            m for m in members if (state := states[m.uid]) is None or state.phase is not EpochPhase.JOINED
        ]
        if not late:
            self._joined(epoch, [state for state in states.values() if state is not None])
            return
        if self.now > epoch.started + self.spec.limits.join + self.settings.grace:
            self._fail_epoch(
                epoch,
                Problem(
                    reason=names.DEADLINE_EXCEEDED,
                    message=f"pod {_pods(late)}: has not joined after {self.spec.limits.join} s"
                    f"{self._refusals(late)}"[:1000],
                ),
                late[0].pod,
            )
            return
        self._join(epoch, states)

    def _join(self, epoch: EpochRun, states: dict[str, EpochState | None]) -> None:
        members = epoch.fact.members
        lead = next(m for m in members if m.first_rank == 0)
        lead_pod = self.pods[lead.uid]

        def send(member: MemberIdentity, rendezvous: Rendezvous | None) -> None:
            self._send(
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
                deadline_seconds=self.spec.limits.join,
            )

        lead_state = states[lead.uid]
        if lead_state is None:
            send(lead, None)
            return
        rendezvous = lead_state.rendezvous
        if rendezvous is None:
            return
        if not usable_host(rendezvous.host, lead_pod.ip):
            self._fail_epoch(
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

    def _joined(self, epoch: EpochRun, states: list[EpochState]) -> None:
        lead = next(m for m in epoch.fact.members if m.first_rank == 0)
        digests = {state.plan.digest if state.plan else "" for state in states}
        if len(digests) > 1 or "" in digests:
            problem = Problem(
                reason=names.PLANS_DIFFER,
                message="the members computed different plans; run one version of weightsync in all pods",
            )
            self._fail_epoch(epoch, problem, lead.pod)
            return
        summary = states[0].plan
        if summary is None or summary.parameters == 0:
            problem = Problem(
                reason=names.ZERO_PARAMETERS,
                message="the trainer has no parameters to send; give Publisher the model whose weights "
                "are served",
            )
            self._fail_epoch(epoch, problem, lead.pod)
            return
        if summary.rounded:
            self._event("Warning", names.EVENT_PRECISION_LOST, summary.rounding)
        failure = self.memory.failure
        self.memory = replace(
            self.memory,
            epoch=replace(epoch, plan=summary, joined=True),
            epoch_backoff=None,
            failure=None if failure is not None and failure.what == "epoch" else failure,
        )

    def _fail_epoch(self, epoch: EpochRun, problem: Problem, culprit: str) -> None:
        message = problem.message if culprit in problem.message else f"pod {culprit}: {problem.message}"
        backoff = self._backoff(self.memory.epoch_backoff, epoch.keys)
        cause = f"{culprit}/{problem.reason}"
        self._event("Warning", names.EPOCH_FAILED, f"{message} ({problem.reason})", cause)
        self.memory = replace(
            self.memory,
            epoch=None,
            epoch_backoff=backoff,
            failure=Failure(
                "epoch", problem.reason, message, culprit, failures=backoff.failures, at=self.now
            ),
        )

    # ---- what to begin -------------------------------------------------------------------------------------

    def _start_something(self) -> None:
        epoch, roster = self.memory.epoch, self.roster
        if self.record is not None or roster.violation is not None or self.spec.suspend:
            return
        if epoch is not None and not epoch.joined:
            return
        wanted = target(self.seen, roster)
        # A flip that failed for good holds its pod in the old round, and only another epoch gets it out.
        stuck = any(m.state.round is not None and _stuck(m.state.round) for m in roster.inference)
        stale = (
            epoch is None
            or stuck
            or epoch.keys != roster.fingerprint
            or epoch.transport != self.spec.wire_transport
        )
        if stale:
            joiner = epoch is None or stuck or bool(roster.fingerprint - epoch.keys)
            if wanted is not None or joiner:
                self._begin_epoch()
        elif wanted is not None and epoch is not None:
            self._begin_round(epoch, wanted)

    def _begin_epoch(self) -> None:
        wait = self.memory.membership_since + self.settings.quiet - self.now
        backoff = self.memory.epoch_backoff
        if backoff is not None and backoff.key == self.roster.fingerprint:
            wait = max(wait, backoff.until - self.now)
        again = self.memory.round_backoff
        if again is not None and isinstance(again.key, tuple) and again.key[0] == self.roster.fingerprint:
            # After a failed round the agents first end what they were at.
            wait = max(wait, min(again.until, self.now + self.spec.retries.backoff) - self.now)
        if wait > 0:
            self._wake(wait)
            return
        failure = self.memory.failure
        if failure is not None:
            # Whoever has not been heard since may be the cause: with it the next epoch would fail as well, and cost all
            # others their movers. One that goes on saying nothing is silent soon, and left out.
            unheard = [m for m in self.roster.members if self.pods[m.identity.uid].agent.asof < failure.at]
            if unheard:
                self.reads.extend(m.identity.uid for m in unheard)
                self._wake(self.settings.tick)
                return
        number = max(self.facts.epoch.number if self.facts.epoch else 0, 0) + 1
        fact = EpochFact(number=number, members=tuple(m.identity for m in self.roster.members))
        self.memory = replace(
            self.memory,
            epoch=EpochRun(fact, self.seen.new_key, self.now, transport=self.spec.wire_transport),
        )
        self.record = self.facts.model_copy(update={"epoch": fact})

    def _begin_round(self, epoch: EpochRun, wanted: Published) -> None:
        backoff = self.memory.round_backoff
        if backoff is not None and backoff.key == (self.roster.fingerprint, wanted.version):
            wait = backoff.until - self.now
            if wait > 0:
                self._wake(wait)
                return
        limits = self.spec.limits
        number = self.memory.next_round
        span = limits.prepare + limits.transfer + limits.commit / 2 + 2 * self.settings.grace
        span = min(span, MAX_SECONDS - limits.commit / 2 - 1)
        run = RoundRun(
            epoch=epoch.fact.number,
            number=number,
            version=wanted.version,
            run_id=self.roster.run_id,
            sequence=wanted.sequence,
            members=epoch.fact.members,
            phase="prepare",
            started=self.now,
            phase_since=self.now,
            decide_by=self.now + span,
            policy=self.spec.flip_policy,
            barrier=self.spec.barrier and not self._is_served(wanted),
        )
        self.memory = replace(self.memory, round=run, next_round=number + 1)
        self._advance_round(run)

    def _is_served(self, wanted: Published) -> bool:
        """Whether a round only brings it to those that lack it: nobody then changes what it generates with."""
        decision = self.facts.decision
        return decision is not None and (
            (decision.version, decision.run_id, decision.sequence)
            == (wanted.version, self.roster.run_id, wanted.sequence)
        )

    # ---- what every look puts right ------------------------------------------------------------------------

    def _end_strays(self) -> None:
        """Ends rounds that agents hold and nobody runs: an unrecorded one is aborted, a decided one
        committed."""
        running, decision = self.memory.round, self.facts.decision
        for pod in self.seen.pods:
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
                if not _flipping(state.round):
                    self._send(
                        identity,
                        "commit",
                        Commit,
                        epoch=held[0],
                        round=held[1],
                        version=decision.version,
                        deadline_seconds=self.spec.limits.commit,
                    )
                continue
            if state.round.phase is RoundPhase.COMMITTING:
                continue
            aborted = self.memory.aborted
            problem = (
                aborted[2]
                if aborted is not None and aborted[:2] == held
                else Problem(
                    reason=names.OPERATOR_RESTARTED,
                    message="no decision on this round was recorded; it is given up",
                )
            )
            self._wake(self.settings.tick)
            self._send(identity, "abort", Abort, epoch=held[0], round=held[1], problem=problem)

    def _tell_trainers(self) -> None:
        """A trainer's agent that has restarted since the newest decision is told of it: the training process waits for
        that word before it publishes again."""
        decision = self.facts.decision
        if decision is None or self.memory.round is not None:
            return
        for member in self.roster.trainers:
            facts = member.state.trainer
            if facts is None or facts.committed is not None or facts.run_id != decision.run_id:
                continue
            self._wake(self.settings.tick)
            self._send_to(
                member,
                "commit",
                Commit,
                epoch=decision.epoch,
                round=decision.round,
                version=decision.version,
                deadline_seconds=self.spec.limits.commit,
            )

    def _admit_or_fence(self) -> None:
        run = self.memory.round
        between = run is not None and run.barrier and run.phase in ("halt", "confirm")
        # A round is over for those beside it once it is decided: what they are admitted with is its version.
        over = self.memory.next_round - 1 if run is None or run.phase == "commit" else run.number - 1
        for member in self.roster.inference:
            facts = member.state.inference
            if facts is None:
                continue
            if holds(facts, self.facts, self.spec):
                if not facts.serving and not between:
                    self._send_to(member, "admit", Admit, version=facts.live_version, after=over)
                    self._wake(self.settings.tick)
            elif facts.serving and not committing(self.memory, self.seen, member, self.settings):
                reason, message = self._why_out(facts)
                self._send_to(member, "fence", Fence, problem=Problem(reason=reason, message=message))
                self._wake(self.settings.tick)

    def _why_out(self, facts: InferenceFacts) -> tuple[str, str]:
        version = committed_version(self.facts)
        if facts.torn:
            told = facts.closed_because or "its live weights are of no one version"
            return names.TORN, f"{told}; the next complete round mends it"
        if version is None:
            return names.NO_VERSION_YET, "spec.beforeFirstVersion is Closed and no version is committed yet"
        return (
            names.OUT_OF_SYNC,
            f"it holds {facts.live_version or 'what it loaded at start'}, the fleet serves {version}",
        )

    def _set_gates(self) -> None:
        candidates = {member.identity.uid: member for member in self.roster.inference}
        remarks = {remark.pod: remark for remark in self.roster.remarks if not remark.takes_part}
        for pod in self.seen.pods:
            if pod.role != ROLE_INFERENCE or not pod.has_gate or pod.terminating:
                continue
            member, state = candidates.get(pod.uid), pod.agent.state
            if member is not None and member.state.inference is not None:
                facts = member.state.inference
                if holds(facts, self.facts, self.spec):
                    if facts.serving:
                        self._gate(pod, True, names.IN_SYNC_REASON, "")
                    elif pod.gate is None or pod.gate.status:
                        self._gate(pod, False, names.NOT_ADMITTED, facts.closed_because or "not serving yet")
                elif not committing(self.memory, self.seen, member, self.settings):
                    self._gate(pod, False, *self._why_out(facts))
            elif state is not None and state.inference is not None and state.role == ROLE_INFERENCE:
                # Silent or out of order. A pod that the operator merely cannot reach goes on as it was,
                # unless it is known to be behind: a partition must not take a fleet that is in sync out of
                # service.
                remark = remarks.get(pod.name)
                silent = remark is not None and remark.reason == names.AGENT_SILENT
                if remark is not None and (not silent or not holds(state.inference, self.facts, self.spec)):
                    self._gate(pod, False, remark.reason, remark.message)
            elif pod.gate is not None and pod.gate.status and pod.name in remarks:
                remark = remarks[pod.name]
                if remark.reason not in names.STARTING:
                    self._gate(pod, False, remark.reason, remark.message)

    def _gate(self, pod: Pod, status: bool, reason: str, message: str) -> None:
        if pod.gate != Gate(status, reason):
            self.gates.append(GateChange(pod.name, pod.uid, status, reason, message[:1024]))

    def _watch_silence(self) -> None:
        """Looks again when an agent that stopped answering would count as silent."""
        for pod in self.seen.pods:
            error = pod.agent.error
            if error is not None and pod.agent.state is not None:
                left = error.since + SILENT_AFTER - self.now
                if left > 0:
                    self._wake(left + 0.01)


def _boot(pod: Pod) -> str:
    return pod.agent.state.boot_id if pod.agent.state is not None else ""


def _flipping(state: RoundState) -> bool:
    """Told to commit and at it: nothing to repeat. With a problem the flip has ended, and may be tried
    again."""
    return state.phase is RoundPhase.COMMITTING and state.problem is None


def _without_others(pod: Pod, uid: str) -> Pod:
    """Without an epoch and a round that another object, of the same name, once made: their numbers mean
    nothing."""
    state = pod.agent.state
    if state is None or state.object_uid == uid:
        return pod
    inference = state.inference and state.inference.model_copy(update={"halted": None})
    fields = {"epoch": None, "round": None, "inference": inference}
    return replace(pod, agent=replace(pod.agent, state=state.model_copy(update=fields)))


def _stuck(state: RoundState) -> bool:
    return state.phase is RoundPhase.COMMITTING and state.problem is not None


def _unexplained() -> Problem:
    return Problem(reason=names.ROUND_FAILED, message="failed without an explanation; see its log")


def _stamp(wall: datetime.datetime) -> str:
    return wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
