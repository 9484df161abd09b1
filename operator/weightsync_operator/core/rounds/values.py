"""The values that go into a plan and come out of it."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Literal

from weightsync_engine.protocol.messages import DEFAULT_FLIP, Addressed, FlipPolicy, PlanSummary, Problem

from ...api.types import EpochFact, Facts, MemberIdentity, RoundReport, WeightSyncSpec
from ..members import Pod, Roster


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
