"""What one plan is made of while it is made, and the words it is told in."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from weightsync_engine.protocol.messages import Addressed, AgentState, Problem

from ... import names
from ...api.types import Facts, MemberIdentity
from ..members import SILENT_AFTER, Pod, resolve
from .values import Backoff, EventNote, GateChange, Memory, Observed, Plan, Send, Settings

MAX_SECONDS = 86400.0
"""The longest time that a message can carry."""


class Draft:
    """One plan while it is made: what is seen, and so far remembered, recorded, sent and shown. Lives for one call."""

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

    def plan(self) -> Plan:
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

    def wake(self, seconds: float) -> None:
        """Look again after so long at the latest."""
        self.wake_in = max(0.05, min(self.wake_in, seconds))

    def state(self, identity: MemberIdentity) -> AgentState | None:
        """The newest state of exactly this process; None when another one, or nobody, is known there."""
        pod = self.pods.get(identity.uid)
        state = pod.agent.state if pod else None
        return state if state is not None and state.boot_id == identity.boot_id else None

    def gone(self, identity: MemberIdentity) -> str:
        """How this process has ended for good; empty while it may be alive."""
        pod = self.pods.get(identity.uid)
        if pod is None:
            return "is deleted"
        if pod.phase in ("Succeeded", "Failed"):
            return f"has ended ({pod.phase})"
        if pod.agent.state is not None and pod.agent.state.boot_id != identity.boot_id:
            return "has restarted"
        return ""

    def silent(self, identity: MemberIdentity) -> str:
        """Why this process counts as silent; empty while it answers."""
        pod = self.pods.get(identity.uid)
        error = pod.agent.error if pod else None
        if error is not None and self.now - error.since >= SILENT_AFTER:
            return f"has not answered for {SILENT_AFTER:.0f} s ({error.message})"
        return ""

    def send(
        self, identity: MemberIdentity, verb: str, make: Callable[..., Addressed], **fields: object
    ) -> None:
        request = make(boot_id=identity.boot_id, object_uid=self.seen.uid, term=self.facts.term, **fields)
        self.sends.append(Send(identity.pod, identity.uid, verb, request))

    def event(self, kind: Literal["Normal", "Warning"], reason: str, message: str, cause: str = "") -> None:
        self.events.append(EventNote(kind, reason, message, cause))

    def refusals(self, identities: Iterable[MemberIdentity]) -> str:
        return refusals(pod for one in identities if (pod := self.pods.get(one.uid)) is not None)

    def backoff(self, before: Backoff | None, key: object) -> Backoff:
        """The pause after one more failure; `key` says of what: another one begins to count anew."""
        failures = before.failures + 1 if before is not None and before.key == key else 1
        retry = self.spec.retries
        pause = min(retry.backoff * 2.0 ** min(failures - 1, 16), retry.max_backoff)
        return Backoff(key, failures, self.now + pause)


def refusals(pods: Iterable[Pod]) -> str:
    """In brackets, what their agents answered instead of doing as told; empty when none did."""
    told = [f"{pod.name}: {pod.agent.refusal}" for pod in pods if pod.agent.refusal]
    return f" ({'; '.join(told[:3])})" if told else ""


def pods_in_words(identities: Iterable[MemberIdentity]) -> str:
    told = [identity.pod for identity in identities]
    return ", ".join(told[:5]) + (f" and {len(told) - 5} more" if len(told) > 5 else "")


def _without_others(pod: Pod, uid: str) -> Pod:
    """Without an epoch and a round that another object, of the same name, once made: their numbers mean
    nothing."""
    state = pod.agent.state
    if state is None or state.object_uid == uid:
        return pod
    inference = state.inference and state.inference.model_copy(update={"halted": None})
    fields = {"epoch": None, "round": None, "inference": inference}
    return replace(pod, agent=replace(pod.agent, state=state.model_copy(update=fields)))


def unexplained() -> Problem:
    return Problem(reason=names.ROUND_FAILED, message="failed without an explanation; see its log")


def stamp(wall: datetime.datetime) -> str:
    return wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod_of_rank(members: Iterable[MemberIdentity], rank: int | None) -> str:
    """Empty for a rank that none of them has, or None."""
    if rank is None:
        return ""
    for member in members:
        if member.first_rank <= rank < member.first_rank + member.ranks:
            return member.pod
    return ""
