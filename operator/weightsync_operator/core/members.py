"""From labelled pods and their agents' answers to ranked members, or to the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from weightsync_engine.protocol.messages import AgentState
from weightsync_engine.protocol.names import (
    ENV_OPERATOR,
    ENV_POD_NAME,
    ENV_POD_UID,
    GATE_IN_SYNC,
    LABEL_ROLE,
    PROTOCOL_VERSION,
    ROLE_INFERENCE,
    ROLE_TRAINER,
)

from .. import names
from ..api.types import MAX_MEMBERS, MemberIdentity

SILENT_AFTER = 5.0
"""Seconds of failed calls after which an agent that did answer counts as silent."""

AgentFault = Literal["unreachable", "timeout", "missing", "unauthorized", "protocol", "malformed"]


@dataclass(frozen=True)
class AgentError:
    """Why the last call to an agent brought no state."""

    fault: AgentFault
    message: str
    since: float
    """Monotonic time of the first failure since the last success."""
    protocol: int | None = None
    """With `protocol`: what the other side speaks."""


@dataclass(frozen=True)
class AgentView:
    """What is known of one pod's agent."""

    state: AgentState | None = None
    asof: float = float("-inf")
    """`state` is at least as new as this monotonic time: the start of the newest request that was
    answered."""
    error: AgentError | None = None
    refusal: str = ""
    """What the agent answered to the newest request when it refused it."""


@dataclass(frozen=True)
class Gate:
    """Our condition on a pod, as it stands."""

    status: bool
    reason: str


@dataclass(frozen=True)
class Pod:
    """What the operator needs of a pod with our labels."""

    name: str
    uid: str
    role: str
    phase: str
    ip: str
    port: int
    terminating: bool = False
    containers_ready: bool = False
    """The kubelet's word: the readiness probe passes, if the pod has one."""
    has_gate: bool = False
    gate: Gate | None = None
    agent: AgentView = field(default_factory=AgentView)


@dataclass(frozen=True)
class Remark:
    """Why a pod takes no part, or what is wrong with one that does."""

    pod: str
    role: str
    reason: str
    message: str
    takes_part: bool = False
    expected: bool = False
    """Part of any pod's life (ended, on its way out or in): nothing to complain about."""


@dataclass(frozen=True)
class Violation:
    """The first thing found wrong: a condition's reason and message."""

    reason: str
    message: str
    needs_a_person: bool = False
    """Waiting alone will not mend it."""


@dataclass(frozen=True)
class Member:
    """A candidate with the ranks that it takes in an epoch built now."""

    identity: MemberIdentity
    host: str
    port: int
    state: AgentState

    @property
    def key(self) -> tuple[str, str]:
        return self.identity.uid, self.identity.boot_id

    @property
    def pod(self) -> str:
        return self.identity.pod


@dataclass(frozen=True)
class Roster:
    """Who could take part now."""

    trainers: tuple[Member, ...] = ()
    inference: tuple[Member, ...] = ()
    """All inference candidates; ranked only when `violation` is None."""
    remarks: tuple[Remark, ...] = ()
    violation: Violation | None = None
    """Why no epoch can be built of them."""
    labelled_trainers: int = 0
    labelled_inference: int = 0

    @property
    def members(self) -> tuple[Member, ...]:
        return self.trainers + self.inference

    @property
    def fingerprint(self) -> frozenset[tuple[str, str]]:
        return frozenset(member.key for member in self.members)

    @property
    def trainer_ranks(self) -> int:
        return sum(member.identity.ranks for member in self.trainers)

    @property
    def world_size(self) -> int:
        return sum(member.identity.ranks for member in self.members)

    @property
    def run_id(self) -> str:
        facts = self.trainers[0].state.trainer if self.trainers else None
        return facts.run_id if facts else ""


def remark_of(pod: Pod, now: float) -> Remark | None:
    """Why this pod is no candidate; None when it is one. Kubernetes' Ready plays no part: it depends on
    us."""

    def because(reason: str, message: str, *, expected: bool = False) -> Remark:
        return Remark(pod.name, pod.role, reason, message, expected=expected)

    if pod.role not in (ROLE_TRAINER, ROLE_INFERENCE):
        return because(
            names.ROLE_UNKNOWN,
            f"pod {pod.name}: label {LABEL_ROLE} is {pod.role!r}; set it to {ROLE_TRAINER} or "
            f"{ROLE_INFERENCE}",
        )
    if pod.terminating:
        return because(names.TERMINATING, f"pod {pod.name} is being deleted", expected=True)
    if pod.phase in ("Succeeded", "Failed"):
        return because(names.NOT_RUNNING, f"pod {pod.name} has ended ({pod.phase})", expected=True)
    if pod.phase != "Running":
        return because(names.NOT_RUNNING, f"pod {pod.name} is {pod.phase or 'not started'}")
    if not pod.ip:
        return because(names.NO_ADDRESS, f"pod {pod.name} has no address yet")
    return _agent_remark(pod, now)


def _agent_remark(pod: Pod, now: float) -> Remark | None:
    view, where = pod.agent, f"pod {pod.name}: its agent at port {pod.port}"

    def because(reason: str, message: str) -> Remark:
        return Remark(pod.name, pod.role, reason, message)

    start = (
        'start vLLM with --weight-transfer-config \'{"backend": "weightsync"}\''
        if pod.role == ROLE_INFERENCE
        else "create a weightsync_engine.Publisher in the training process"
    )
    error = view.error
    if error is not None:
        match error.fault:
            case "missing":
                return because(
                    names.AGENT_MISSING,
                    f"pod {pod.name}: what answers at port {pod.port} is no agent ({error.message}); {start}",
                )
            case "unauthorized":
                return because(
                    names.AGENT_REFUSES_TOKEN,
                    f"{where} refuses the operator's token ({error.message}); set {ENV_OPERATOR} in the "
                    "pod to "
                    "the operator's <namespace>:<service account>",
                )
            case "protocol":
                side = (
                    "the weightsync version in the pod"
                    if error.protocol is not None and error.protocol < PROTOCOL_VERSION
                    else "the operator"
                )
                return because(
                    names.PROTOCOL_MISMATCH,
                    f"{where} speaks protocol {error.protocol}, the operator {PROTOCOL_VERSION}; "
                    f"upgrade {side}",
                )
            case "malformed":
                return because(names.AGENT_MALFORMED, f"{where} gave an answer that is none: {error.message}")
        if view.state is None or now - error.since >= SILENT_AFTER:
            return because(
                names.AGENT_SILENT,
                f"{where} does not answer ({error.message}); if the server is up and this stays, {start}",
            )
    state = view.state
    if state is None:
        return because(names.AGENT_SILENT, f"{where} has not answered yet")
    if state.pod_uid not in (None, pod.uid) or (state.pod_uid is None and state.pod_name != pod.name):
        return because(
            names.ANOTHER_POD_ANSWERS,
            f"pod {pod.name}: pod {state.pod_name} answers at its address; if it is the same pod, set "
            f"{ENV_POD_NAME} and {ENV_POD_UID} in it by the downward API",
        )
    if state.role != pod.role:
        return because(
            names.ROLE_MISMATCH,
            f"pod {pod.name} is labelled {LABEL_ROLE}={pod.role} but runs a {state.role} agent; mend "
            "the label",
        )
    if state.problem is not None:
        return because(state.problem.reason, f"pod {pod.name}: {state.problem.message}")
    trainer, inference = state.trainer, state.inference
    if pod.role == ROLE_TRAINER and (trainer is None or not trainer.ranks or len(trainer.run_id) > 128):
        return because(names.AGENT_MALFORMED, f"{where} names no trainer ranks or no run id")
    if pod.role == ROLE_INFERENCE and (inference is None or inference.workers < 1):
        return because(names.AGENT_MALFORMED, f"{where} names no workers")
    if inference is not None and inference.starting:
        return because(
            names.MOVERS_STARTING,
            f"pod {pod.name}: its movers are starting; if this stays, the pod's log says why they do not",
        )
    return None


def resolve(pods: Sequence[Pod], now: float, min_inference: int = 1) -> Roster:
    """Ranks the candidates: trainers at their own global ranks [0, T), inference pods by name at [T, T +
    N)."""
    remarks: list[Remark] = []
    candidates: list[Pod] = []
    for pod in sorted(pods, key=lambda pod: (pod.name, pod.uid)):
        remark = remark_of(pod, now)
        if remark is not None:
            remarks.append(remark)
            continue
        candidates.append(pod)
        if pod.role == ROLE_INFERENCE and not pod.has_gate:
            remarks.append(
                Remark(
                    pod.name,
                    pod.role,
                    names.GATE_MISSING,
                    f"pod {pod.name} takes part but has no readiness gate, so a Service sends it "
                    "traffic while it "
                    f"is out of sync; add readinessGates: [{{conditionType: {GATE_IN_SYNC}}}] to its "
                    "template",
                    takes_part=True,
                )
            )
    trainer_pods = [pod for pod in candidates if pod.role == ROLE_TRAINER]
    violation, trainers = _trainers(trainer_pods, remarks)
    first = sum(member.identity.ranks for member in trainers)
    inference: list[Member] = []
    for pod in candidates:
        if pod.role == ROLE_INFERENCE:
            state = pod.agent.state
            assert state is not None and state.inference is not None  # remark_of saw to it
            inference.append(_member(pod, state, first, state.inference.workers))
            first += state.inference.workers
    if violation is None:
        violation = _inference_violation(inference, remarks, min_inference)
    if violation is None and len(trainers) + len(inference) > MAX_MEMBERS:
        violation = Violation(
            names.TOO_FEW_INFERENCE_PODS,
            f"{len(trainers) + len(inference)} pods carry the labels of this object; at most "
            f"{MAX_MEMBERS} can",
            True,
        )
    labelled = [pod for pod in pods if not (pod.terminating or pod.phase in ("Succeeded", "Failed"))]
    return Roster(
        tuple(trainers),
        tuple(inference),
        tuple(remarks),
        violation,
        sum(pod.role == ROLE_TRAINER for pod in labelled),
        sum(pod.role == ROLE_INFERENCE for pod in labelled),
    )


def _member(pod: Pod, state: AgentState, first_rank: int, ranks: int) -> Member:
    identity = MemberIdentity(
        pod=pod.name,
        uid=pod.uid,
        boot_id=state.boot_id,
        role="trainer" if pod.role == ROLE_TRAINER else "inference",
        first_rank=first_rank,
        ranks=ranks,
    )
    return Member(identity, pod.ip, pod.port, state)


def _because_of(remarks: Sequence[Remark], role: str) -> str:
    """What keeps pods of a role out, as the tail of a message."""
    told = [remark.message for remark in remarks if remark.role == role and not remark.takes_part]
    return "".join(f"; {message}" for message in told[:3]) + (
        f"; and {len(told) - 3} more" if len(told) > 3 else ""
    )


def _trainers(pods: Sequence[Pod], remarks: Sequence[Remark]) -> tuple[Violation | None, list[Member]]:
    """The trainer pods in rank order, or why they are no whole trainer (members are then empty)."""
    if not pods:
        return (
            Violation(
                names.NO_TRAINER,
                f"no pod with {LABEL_ROLE}={ROLE_TRAINER} can take part yet"
                + _because_of(remarks, ROLE_TRAINER),
            ),
            [],
        )
    facts = []
    for pod in pods:
        assert pod.agent.state is not None and pod.agent.state.trainer is not None  # remark_of saw to it
        facts.append((pod, pod.agent.state, pod.agent.state.trainer))
    leads = [pod.name for pod, _, trainer in facts if 0 in trainer.ranks]
    if len(leads) > 1:
        return (
            Violation(
                names.TWO_LEADS,
                f"pods {' and '.join(leads)} both say that they run the trainer's rank 0; remove the "
                "label from "
                "the pods of one of the two training runs",
                True,
            ),
            [],
        )
    runs: dict[str, list[str]] = {}
    for pod, _, trainer in facts:
        runs.setdefault(trainer.run_id, []).append(pod.name)
    if len(runs) > 1:
        told = "; ".join(f"run {run}: {', '.join(pods)}" for run, pods in sorted(runs.items()))
        return (
            Violation(
                names.TRAINER_INCONSISTENT, f"the trainer pods belong to different training runs ({told})"
            ),
            [],
        )
    world = {trainer.world_size for _, _, trainer in facts}
    if len(world) > 1:
        return (
            Violation(
                names.TRAINER_INCONSISTENT,
                f"the trainer pods disagree on the number of ranks: {sorted(world)}",
                True,
            ),
            [],
        )
    owner: dict[int, str] = {}
    for pod, _, trainer in facts:
        if list(trainer.ranks) != list(range(trainer.ranks[0], trainer.ranks[0] + len(trainer.ranks))):
            return (
                Violation(
                    names.TRAINER_INCONSISTENT,
                    f"pod {pod.name} holds trainer ranks {list(trainer.ranks)[:8]}, which have gaps; "
                    "give each pod "
                    "neighbouring ranks",
                    True,
                ),
                [],
            )
        for rank in trainer.ranks:
            if rank in owner:
                return (
                    Violation(
                        names.TRAINER_INCONSISTENT,
                        f"pods {owner[rank]} and {pod.name} both say that they run the trainer's rank {rank}",
                        True,
                    ),
                    [],
                )
            owner[rank] = pod.name
    size = world.pop()
    missing = sorted(set(range(size)) - set(owner))
    if missing or len(owner) != size:
        return (
            Violation(
                names.TRAINER_INCOMPLETE,
                f"{len(owner)} of {size} trainer ranks are here; missing: "
                f"{', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}"
                + _because_of(remarks, ROLE_TRAINER),
            ),
            [],
        )
    ordered = sorted(facts, key=lambda item: item[2].ranks[0])
    return None, [
        _member(pod, state, trainer.ranks[0], len(trainer.ranks)) for pod, state, trainer in ordered
    ]


def _inference_violation(
    inference: Sequence[Member], remarks: Sequence[Remark], least: int
) -> Violation | None:
    if not inference:
        return Violation(
            names.NO_INFERENCE_PODS,
            f"no pod with {LABEL_ROLE}={ROLE_INFERENCE} can take part yet"
            + _because_of(remarks, ROLE_INFERENCE),
        )
    if len(inference) < least:
        return Violation(
            names.TOO_FEW_INFERENCE_PODS,
            f"{len(inference)} inference pods can take part, spec.inference.minMembers asks for {least}"
            + _because_of(remarks, ROLE_INFERENCE),
        )
    return None
