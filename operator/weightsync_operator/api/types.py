"""The WeightSync object: what a user writes (spec) and what the operator answers (status).

The CRD is generated from these types (`api.crd`), so every list and string is bounded here, and every rule
that ties fields together is a CEL rule whose message says what to write instead. Fields that a rule ties
have no default in the schema: the defaults are the properties at the end of each type.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from pydantic.alias_generators import to_camel

from weightsync_engine.protocol.messages import FlipPolicy


def rules(*pairs: tuple[str, str]) -> dict[str, Any]:
    """CEL rules for a type or field, as (rule, message)."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in pairs]}


class ApiModel(BaseModel):
    """Base: camelCase on the wire; what a newer API server knows beyond this is ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


VERSION_RULE = rules(
    (
        "self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$') && self.size() <= 63",
        "must be the name under which the trainer publishes, for example step-120: 1 to 63 letters, digits, "
        "'-', '_' and '.', beginning and ending with a letter or digit",
    )
)
SpecVersion = Annotated[str, Field(max_length=256, json_schema_extra=VERSION_RULE)]

Version = Annotated[str, Field(max_length=63)]
PodName = Annotated[str, Field(max_length=253)]
Identifier = Annotated[str, Field(max_length=64)]
Short = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=2048)]

MAX_MEMBERS = 1024
MAX_SHOWN_MEMBERS = 64
MAX_ROUNDS = 5
MAX_EARLIER = 32


def seconds(default: int, what: str) -> Any:
    """A duration in whole seconds; the default is applied by the operator."""
    return Field(
        default=None,
        ge=1,
        le=21600,
        description=f"{what} Default: {default}.",
        json_schema_extra=rules(
            (
                "self >= 1 && self <= 21600",
                f"must be 1 to 21600 whole seconds; leave it out for the default of {default}",
            )
        ),
    )


class Trigger(ApiModel):
    """What starts a round."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type != 'OnSpecVersion' || has(self.version)",
                "trigger.version is required with type OnSpecVersion: write the version to serve, "
                "or use type OnPublish",
            ),
            (
                "self.type != 'OnPublish' || !has(self.version)",
                "trigger.version does not go with type OnPublish, which follows the trainer: remove version, "
                "or use type OnSpecVersion",
            ),
            (
                "self.type != 'OnPublish' || !has(self.allowRollback)",
                "trigger.allowRollback does not go with type OnPublish, which follows the trainer: remove it, "
                "or use type OnSpecVersion",
            ),
        )
    )

    type: Literal["OnPublish", "OnSpecVersion"] = Field(
        description="OnPublish: every version that the trainer publishes. OnSpecVersion: the version "
        "written here, "
        "once the trainer has published it."
    )
    version: SpecVersion | None = Field(default=None, description="With OnSpecVersion: the version to serve.")
    allow_rollback: bool | None = Field(
        default=None,
        description="With OnSpecVersion: whether version may be one that came before the one that is served, so that "
        "the fleet goes back to it. Default: false.",
    )


class Flip(ApiModel):
    """How a version goes live once every member has verified it."""

    strategy: Literal["Rolling", "Barrier"] | None = Field(
        default=None,
        description="Rolling: every inference pod as soon as it is told, so that for a moment, at most "
        "deadlines.commitSeconds, pods generate with different versions. Barrier: no two pods generate with "
        "different versions at the same time; all stand still before the first one flips, and one that cannot be "
        "reached holds back the version until it answers or is deleted. Default: Rolling.",
    )
    requests: Literal["Keep", "Wait", "Abort"] | None = Field(
        default=None,
        description="What requests do that run at the flip. Keep: they stand still for it and go on with the new "
        "version, keeping the tokens that they have. Wait: the flip waits until they have ended, within "
        "deadlines.commitSeconds; new ones wait meanwhile. Abort: they end at once with finish reason abort. "
        "Default: Keep.",
    )
    prefix_cache: Literal["Reset", "Kept"] | None = Field(
        default=None,
        description="Reset: keys and values that were computed with the old version are forgotten, and those of "
        "running requests computed anew. Kept: running requests go on with them, and new requests with an equal "
        "beginning start from them, so that answers are made of both versions: faster, and not what either version "
        "alone would say. Default: Reset.",
    )

    @property
    def policy(self) -> FlipPolicy:
        """As agents are told."""
        requests: dict[str, Literal["keep", "wait", "abort"]] = {
            "Keep": "keep",
            "Wait": "wait",
            "Abort": "abort",
        }
        return FlipPolicy(
            requests=requests[self.requests or "Keep"],
            prefix_cache="kept" if self.prefix_cache == "Kept" else "reset",
        )


class Deadlines(ApiModel):
    """How long each phase may take before it fails and names who was late."""

    join_seconds: int | None = seconds(120, "Building the communicator and agreeing on the plan.")
    prepare_seconds: int | None = seconds(60, "Until every member is ready for a transfer.")
    transfer_seconds: int | None = seconds(300, "Transfer and verification.")
    commit_seconds: int | None = seconds(
        30, "From the decision until every inference pod serves the version."
    )

    @property
    def join(self) -> int:
        return self.join_seconds or 120

    @property
    def prepare(self) -> int:
        return self.prepare_seconds or 60

    @property
    def transfer(self) -> int:
        return self.transfer_seconds or 300

    @property
    def commit(self) -> int:
        return self.commit_seconds or 30


class Retry(ApiModel):
    """How a failed round or epoch is tried again: after backoffSeconds, doubled up to maxBackoffSeconds."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || "
                "self.backoffSeconds <= self.maxBackoffSeconds",
                "retry.maxBackoffSeconds must not be smaller than retry.backoffSeconds",
            )
        )
    )

    backoff_seconds: int | None = seconds(2, "Pause before the first retry.")
    max_backoff_seconds: int | None = seconds(120, "Longest pause between retries.")

    @property
    def backoff(self) -> int:
        return self.backoff_seconds or min(2, self.max_backoff_seconds or 2)

    @property
    def max_backoff(self) -> int:
        return self.max_backoff_seconds or max(120, self.backoff)


class Inference(ApiModel):
    """What is asked of the inference pods together."""

    min_members: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MEMBERS,
        description="A round waits until at least this many inference pods can take part. Default: 1.",
        json_schema_extra=rules(
            (
                f"self >= 1 && self <= {MAX_MEMBERS}",
                f"must be 1 to {MAX_MEMBERS} pods; leave it out for the default of 1",
            )
        ),
    )


class WeightSyncSpec(ApiModel):
    """Pods take part by their labels: weightsync.dev/sync with this object's name, weightsync.dev/role."""

    trigger: Trigger | None = Field(default=None, description="What starts a round. Default: OnPublish.")
    before_first_version: Literal["ServeLoadedWeights", "Closed"] | None = Field(
        default=None,
        description="Whether inference pods serve what they loaded at start until the first version is "
        "committed. "
        "Default: ServeLoadedWeights.",
    )
    transport: Literal["Auto", "Gloo", "NcclM2n", "NcclP2p"] | None = Field(
        default=None, description="How the weights travel. Default: Auto, by the pods' devices."
    )
    flip: Flip | None = None
    deadlines: Deadlines | None = None
    retry: Retry | None = None
    inference: Inference | None = None
    suspend: bool | None = Field(
        default=None, description="Starts no new round or epoch while true; what runs is finished."
    )

    @property
    def wanted_version(self) -> str | None:
        """The version that OnSpecVersion asks for; None with OnPublish."""
        return self.trigger.version if self.trigger and self.trigger.type == "OnSpecVersion" else None

    @property
    def rollback_allowed(self) -> bool:
        return bool(self.trigger and self.trigger.allow_rollback)

    @property
    def flip_policy(self) -> FlipPolicy:
        return (self.flip or Flip()).policy

    @property
    def barrier(self) -> bool:
        return self.flip is not None and self.flip.strategy == "Barrier"

    @property
    def closed_before_first_version(self) -> bool:
        return self.before_first_version == "Closed"

    @property
    def limits(self) -> Deadlines:
        return self.deadlines or Deadlines()

    @property
    def retries(self) -> Retry:
        return self.retry or Retry()

    @property
    def min_members(self) -> int:
        return (self.inference and self.inference.min_members) or 1

    @property
    def wire_transport(self) -> Literal["auto", "gloo", "nccl_m2n", "nccl_p2p"]:
        match self.transport:
            case "Gloo":
                return "gloo"
            case "NcclM2n":
                return "nccl_m2n"
            case "NcclP2p":
                return "nccl_p2p"
            case _:
                return "auto"


# ---- status: durable facts ---------------------------------------------------------------------------------


class MemberIdentity(ApiModel):
    """One process that takes part: the pod's UID and the boot id of the process in it."""

    pod: PodName
    uid: Identifier
    boot_id: Identifier
    role: Literal["trainer", "inference"]
    first_rank: Annotated[int, Field(ge=0, le=65535)]
    ranks: Annotated[int, Field(ge=1, le=65536)]


class EpochFact(ApiModel):
    """One fixed membership with one communicator."""

    number: Annotated[int, Field(ge=1)]
    members: Annotated[tuple[MemberIdentity, ...], Field(max_length=MAX_MEMBERS)]


class DecisionFact(ApiModel):
    """The point of no return of a round: recorded before the first pod is told to go live."""

    epoch: Annotated[int, Field(ge=1)]
    round: Annotated[int, Field(ge=1)]
    version: Version
    run_id: Short = Field(description="The trainer's run that published the version.")
    sequence: Annotated[int, Field(ge=0)] = Field(description="The version's place in that run.")
    members: Annotated[tuple[MemberIdentity, ...], Field(max_length=MAX_MEMBERS)]
    earlier: Annotated[tuple[Version, ...], Field(max_length=MAX_EARLIER)] = Field(
        default=(), description="Versions that were served before this one, newest first."
    )
    finished: bool = Field(
        default=False, description="Every member has the version, or is kept from serving."
    )


class Facts(ApiModel):
    """What a restarted operator goes on from. Each change is written before anyone acts on it."""

    term: Annotated[int, Field(ge=0)] = Field(default=0, description="Raised by every start of the operator.")
    epoch: EpochFact | None = None
    decision: DecisionFact | None = None


# ---- status: report ----------------------------------------------------------------------------------------


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    type: Short
    status: Literal["True", "False", "Unknown"]
    reason: Short
    message: Text
    observed_generation: int
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]


class ReportModel(ApiModel):
    """What is only shown: a field with nothing to say is left out, so that `kubectl describe` stays short."""

    @model_serializer(mode="wrap")
    def _without_blanks(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value != ""}


class MemberReport(ReportModel):
    """One pod as `kubectl describe` shows it."""

    pod: PodName
    role: Short
    ranks: Short = Field(default="", description="First and last rank in the epoch, for example 2-3.")
    version: Annotated[str, Field(max_length=63)] = ""
    state: Short
    message: Text = ""


class RoundReport(ReportModel):
    """One finished round."""

    number: int
    version: Version
    outcome: Literal["Committed", "Aborted"]
    finished_at: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    duration: Annotated[str, Field(max_length=32)] = ""
    rate: Annotated[str, Field(max_length=32)] = ""
    culprit: PodName = Field(default="", description="The pod that the failure is blamed on.")
    reason: Short = ""
    message: Text = ""
    attempts: int = Field(default=1, description="Failures in a row of the same version for the same reason.")
    content: Annotated[str, Field(max_length=64)] = Field(
        default="", description="One word for the weights: equal for equal bits, whatever the version."
    )
    alike: int = Field(
        default=1, description="Versions in a row up to this one whose weights are equal, bit for bit."
    )


class Report(ApiModel):
    """All of the status that is no durable fact."""

    observed_generation: int
    version: Version | None = Field(default=None, description="The committed version: what the fleet serves.")
    trainers: Short = Field(default="", description="Trainer pods that take part, of those labelled.")
    inference: Short = Field(default="", description="Inference pods in sync, of those that are members.")
    last_round: RoundReport | None = Field(default=None, description="The newest committed round.")
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ]
    members: Annotated[tuple[MemberReport, ...], Field(max_length=MAX_SHOWN_MEMBERS)] = ()
    members_not_shown: int | None = None
    rounds: Annotated[tuple[RoundReport, ...], Field(max_length=MAX_ROUNDS)] = Field(
        default=(), description="The last rounds, newest first."
    )


class WeightSyncStatus(Report, Facts):
    """Facts and report as stored. Two field managers share it, so that no field is required in the schema."""
