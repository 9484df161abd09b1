"""Every name that the operator shows: conditions, reasons, events, field managers."""

from __future__ import annotations

from weightsync_engine.protocol.names import GROUP

API_VERSION = "v1alpha1"
PLURAL = "weightsyncs"
KIND = "WeightSync"

FINALIZER = f"{GROUP}/operator"
ANNOTATION_PREFIX = f"operator.{GROUP}"

MANAGER_FACTS = "weightsync-facts"
"""Field manager of the durable facts: each write of it carries a resourceVersion."""
MANAGER_STATUS = "weightsync-status"
"""Field manager of the rest of the status, which is only a report."""
MANAGER_GATE = "weightsync-gate"
"""Field manager of our one condition on pods."""

REPORTING_CONTROLLER = f"{GROUP}/operator"
LEASE = "weightsync-operator"
SERVICE_ACCOUNT = "weightsync-operator"

# Conditions of the object, in the order in which `kubectl describe` shows them.
READY = "Ready"
MEMBERS_RESOLVED = "MembersResolved"
PLAN_RESOLVED = "PlanResolved"
RENDEZVOUS_ESTABLISHED = "RendezvousEstablished"
IN_SYNC = "InSync"
RECONCILING = "Reconciling"
STALLED = "Stalled"
CONDITIONS = (
    READY,
    MEMBERS_RESOLVED,
    PLAN_RESOLVED,
    RENDEZVOUS_ESTABLISHED,
    IN_SYNC,
    RECONCILING,
    STALLED,
)

# Why a pod with our labels takes no part, or not without a remark.
NOT_RUNNING = "NotRunning"
TERMINATING = "Terminating"
NO_ADDRESS = "NoAddress"
AGENT_SILENT = "AgentSilent"
AGENT_MISSING = "AgentMissing"
AGENT_REFUSES_TOKEN = "AgentRefusesToken"
AGENT_MALFORMED = "AgentMalformed"
MOVERS_STARTING = "MoversStarting"
ANOTHER_POD_ANSWERS = "AnotherPodAnswers"
ROLE_UNKNOWN = "RoleUnknown"
ROLE_MISMATCH = "RoleMismatch"
PROTOCOL_MISMATCH = "ProtocolMismatch"
GATE_MISSING = "ReadinessGateMissing"

# Why there is no complete set of members.
NO_TRAINER = "NoTrainer"
NO_INFERENCE_PODS = "NoInferencePods"
TRAINER_INCOMPLETE = "TrainerIncomplete"
TWO_LEADS = "TwoLeads"
TRAINER_INCONSISTENT = "TrainerInconsistent"
TOO_FEW_INFERENCE_PODS = "TooFewInferencePods"

# Outcomes and phases.
RESOLVED = "Resolved"
ESTABLISHED = "Established"
IN_SYNC_REASON = "InSync"
OUT_OF_SYNC = "OutOfSync"
TORN = "Torn"
NO_VERSION_YET = "NoVersionYet"
WAITING_FOR_FIRST_VERSION = "WaitingForFirstVersion"
VERSION_UNAVAILABLE = "VersionUnavailable"
VERSION_NOT_PUBLISHED = "VersionNotPublished"
ROLLBACK_NOT_ALLOWED = "RollbackNotAllowed"
NOT_ADMITTED = "NotAdmitted"
COMMIT_LATE = "CommitLate"
PAYLOAD_UNCHANGED = "PayloadUnchanged"
BUILDING_EPOCH = "BuildingEpoch"
NO_EPOCH = "NoEpoch"
EPOCH_FAILED = "EpochFailed"
ROUND_FAILED = "RoundFailed"
ROUND_RUNNING = "RoundRunning"
IDLE = "Idle"
SUSPENDED = "Suspended"
RETRYING = "Retrying"
PROGRESSING = "Progressing"
DEADLINE_EXCEEDED = "DeadlineExceeded"
MEMBER_GONE = "MemberGone"
MEMBER_SILENT = "MemberSilent"
PLANS_DIFFER = "PlansDiffer"
ZERO_PARAMETERS = "ZeroParameters"
BAD_RENDEZVOUS = "BadRendezvous"
NOT_HALTED = "NotHalted"
OPERATOR_RESTARTED = "OperatorRestarted"
SUPERSEDED = "Superseded"

STARTING = frozenset({NOT_RUNNING, NO_ADDRESS, AGENT_SILENT, MOVERS_STARTING})
"""What is said of a pod that may only need time."""

# Events that are no condition's reason.
EVENT_COMMITTED = "Committed"
EVENT_PRECISION_LOST = "PrecisionLost"
EVENT_ROLLED_FORWARD = "RolledForward"
EVENT_POD_LEFT_OUT = "PodLeftOut"
