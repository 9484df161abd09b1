"""One object's loop body: observe -> plan -> act -> report. Knows nothing of kopf."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from weightsync_engine.protocol.messages import AgentState, Leave

from .. import names
from ..api.types import Condition, Facts, Report, WeightSyncSpec
from ..core.members import AgentView, Pod
from ..core.rounds import EventNote, GateChange, Memory, Observed, Plan, Send, Settings, plan
from ..core.status import report
from .agents import Agents
from .events import Repeats
from .kube import Kube, KubeError, KubeUnavailable, pod_of

_LOG = logging.getLogger(__name__)

_STEPS = 8
"""Durable steps that one call of `step` takes at most before it lets others have their turn."""
LEAVE_SECONDS = 3.0
"""How long a deletion waits at most for agents to hear of it."""
_FIRST_WORDS_SECONDS = 2.0
_MIN_REPORT_SECONDS = 1.0
"""While a round runs, reports that change nothing but a message or a member's state wait this long."""


class ObjectGone(Exception):
    """The object is deleted, or another one has its name: nothing is left to do for this one."""


class Reconciler:
    """Works for one object, as long as its process holds the Lease."""

    def __init__(
        self,
        kube: Kube,
        agents: Agents,
        namespace: str,
        name: str,
        uid: str,
        *,
        instance: str = "",
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self._kube, self._agents = kube, agents
        self._namespace, self._name, self._uid = namespace, name, uid
        self._instance = instance or "operator"
        self._settings = settings or Settings()
        self._clock, self._wall = clock, wall
        self._memory = Memory()
        self._facts: Facts | None = None
        """None: what the object says is not known for sure, so nothing may be planned."""
        self._reported: dict[str, Any] = {}
        self._reported_at = float("-inf")
        self._repeats = Repeats()

    # ---- durable facts -------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Raises the term with a compare-and-swap, and goes on from what the object says.

        This is every operator start, and also the way out of a write with an unclear end: the new
        resourceVersion keeps that write from being done any later, and what it may have done already is
        read here.
        """
        raw = await self._read()
        status = raw.get("status") or {}
        facts = Facts.model_validate(status)
        facts = facts.model_copy(update={"term": facts.term + 1})
        await self._kube.apply_status(
            self._namespace,
            self._name,
            self._uid,
            _dump(facts),
            names.MANAGER_FACTS,
            raw["metadata"]["resourceVersion"],
        )
        self._facts = facts
        before = self._memory
        self._memory = replace(
            Memory(),
            rounds=before.rounds,
            last_committed=before.last_committed,
            failure=before.failure,
            next_round=before.next_round,
            noted=before.noted,
        )
        self._take_over_report(status)

    def _take_over_report(self, status: dict[str, Any]) -> None:
        """What an earlier operator showed: rounds stay on the list, and an equal report is not written
        again."""
        self._reported = {key: value for key, value in status.items() if key not in _dump_names(Facts)}
        try:
            old = Report.model_validate({"observedGeneration": 0, "conditions": (), **status})
        except ValidationError as error:
            _LOG.warning("%s/%s: an older report is not readable: %s", self._namespace, self._name, error)
            return
        newest = max((entry.number for entry in old.rounds), default=0)
        self._memory = replace(
            self._memory,
            rounds=self._memory.rounds or old.rounds,
            last_committed=self._memory.last_committed or old.last_round,
            next_round=max(self._memory.next_round, newest + 1),
        )
        decision = self._facts.decision if self._facts else None
        if decision is not None:
            self._memory = replace(self._memory, next_round=max(self._memory.next_round, decision.round + 1))

    async def _read(self) -> dict[str, Any]:
        try:
            raw = await self._kube.get_object(self._namespace, self._name)
        except KubeError as error:
            if error.status == 404:
                raise ObjectGone from error
            raise
        if raw["metadata"]["uid"] != self._uid:
            raise ObjectGone
        return raw

    async def _record(self, facts: Facts) -> bool:
        """Writes facts if nobody else has; whether they are written. Unclear or overtaken: begin anew."""
        assert self._facts is not None
        try:
            raw = await self._read()
        except (KubeError, KubeUnavailable) as error:
            # Not written for sure: a round that cannot be decided is still ours to abort.
            _LOG.warning("%s/%s: cannot record: %s", self._namespace, self._name, error)
            return False
        try:
            stored = Facts.model_validate(raw.get("status", {}))
            if stored != self._facts:
                _LOG.warning("%s/%s: its facts were changed by another", self._namespace, self._name)
                self._facts = None
                return False
            await self._kube.apply_status(
                self._namespace,
                self._name,
                self._uid,
                _dump(facts),
                names.MANAGER_FACTS,
                raw["metadata"]["resourceVersion"],
            )
        except KubeError as error:
            if error.status == 404:
                raise ObjectGone from error
            if error.status != 409:
                _LOG.error("%s/%s: cannot record: %s", self._namespace, self._name, error)
            return False
        except KubeUnavailable as error:
            _LOG.warning("%s/%s: recording ended unclear: %s", self._namespace, self._name, error)
            self._facts = None
            return False
        self._facts = facts
        return True

    # ---- the step ------------------------------------------------------------------------------------------

    async def step(
        self, spec: WeightSyncSpec, generation: int, pods: Callable[[], Sequence[dict[str, Any]]]
    ) -> float:
        """Does what is due; seconds until the next step is, if nothing wakes it before.

        Raises ObjectGone. Any trouble with the API server is logged and tried again.
        """
        if self._facts is None:
            try:
                await self._begin()
            except (KubeError, KubeUnavailable) as error:
                _LOG.warning("%s/%s: cannot begin: %s", self._namespace, self._name, error)
                return 1.0
            # Who has not been asked yet is not silent: a restarted operator must not cry wolf.
            self._agents.track([pod_of(item, AgentView()) for item in pods()])
            await self._agents.first_words(_FIRST_WORDS_SECONDS)
        events: list[EventNote] = []
        for _ in range(_STEPS):
            observed = self._observe(spec, generation, pods())
            decided = plan(self._memory, observed, self._settings)
            self._memory = decided.memory
            events += decided.events
            if decided.facts is None:
                break
            if not await self._record(decided.facts):
                await self._tell(events)
                return 0.2
        else:
            decided = replace(decided, wake_in=0.0)
        for send in decided.sends:
            self._agents.submit(send)
        for uid in decided.reads:
            self._agents.refresh(uid)
        wake_in = decided.wake_in
        if not await self._show(decided, observed, events):
            wake_in = min(wake_in, 1.0)
        return min(wake_in, self._repeats.wait(self._clock()) + 0.01)

    def _observe(self, spec: WeightSyncSpec, generation: int, raw: Sequence[dict[str, Any]]) -> Observed:
        assert self._facts is not None
        self._agents.track([pod_of(item, AgentView()) for item in raw])
        return Observed(
            uid=self._uid,
            generation=generation,
            spec=spec,
            facts=self._facts,
            pods=tuple(pod_of(item, self._agents.view(item["metadata"]["uid"])) for item in raw),
            now=self._clock(),
            wall=self._wall(),
            new_key=secrets.token_hex(32),
        )

    # ---- what is only shown --------------------------------------------------------------------------------

    async def _show(self, decided: Plan, observed: Observed, events: list[EventNote]) -> bool:
        """Gates, report, events, side by side; whether all was written."""
        results = await asyncio.gather(
            self._report(decided, observed),
            self._tell(events),
            *(self._set_gate(change) for change in decided.gates),
        )
        return all(results)

    async def _report(self, decided: Plan, observed: Observed) -> bool:
        before = tuple(Condition.model_validate(item) for item in self._reported.get("conditions", ()))
        wanted = _dump(report(decided.memory, observed, decided.roster, before, self._settings))
        if wanted == self._reported:
            return True
        soon = self._reported_at + _MIN_REPORT_SECONDS - self._clock()
        if decided.memory.round is not None and soon > 0 and not _matters(self._reported, wanted):
            return False
        try:
            await self._kube.apply_status(
                self._namespace, self._name, self._uid, wanted, names.MANAGER_STATUS
            )
        except (KubeError, KubeUnavailable) as error:
            if isinstance(error, KubeError) and error.status in (404, 409):
                with contextlib.suppress(KubeError, KubeUnavailable):
                    await self._read()  # raises ObjectGone if that is why
            _LOG.warning("%s/%s: cannot write the status: %s", self._namespace, self._name, error)
            return False
        self._reported, self._reported_at = wanted, self._clock()
        return True

    async def _tell(self, events: Sequence[EventNote]) -> bool:
        """Events are a courtesy: one that cannot be written is not tried again. The log has each of them."""
        for note in events:
            log = _LOG.warning if note.type == "Warning" else _LOG.info
            log("%s/%s: %s: %s", self._namespace, self._name, note.reason, note.message)
        for due in self._repeats.due(events, self._clock()):
            try:
                await self._kube.event(
                    self._namespace,
                    self._name,
                    self._uid,
                    due.note,
                    self._wall(),
                    self._instance,
                    count=due.count,
                )
            except (KubeError, KubeUnavailable) as error:
                _LOG.warning("%s/%s: cannot write an event: %s", self._namespace, self._name, error)
        return True

    async def _set_gate(self, change: GateChange) -> bool:
        try:
            await self._kube.set_gate(self._namespace, change, self._wall())
        except KubeError as error:
            # The pod of this UID is no more; the watch will tell.
            if error.status not in (404, 409, 422):
                _LOG.error("pod %s/%s: cannot set its gate: %s", self._namespace, change.pod, error)
                return False
        except KubeUnavailable as error:
            _LOG.warning("pod %s/%s: cannot set its gate: %s", self._namespace, change.pod, error)
            return False
        return True

    # ---- the end -------------------------------------------------------------------------------------------

    async def leave(self, raw: Sequence[dict[str, Any]]) -> None:
        """The object is being deleted: pods serve on as they are. Ends in a few seconds whatever the pods
        do."""
        epoch = self._facts.epoch if self._facts else None
        if epoch is None or self._facts is None:
            return
        pods: list[tuple[Pod, AgentState]] = []
        for item in raw:
            pod = pod_of(item, self._agents.view(item["metadata"]["uid"]))
            if pod.agent.state is not None:
                pods.append((pod, pod.agent.state))
        for pod, state in pods:
            request = Leave(
                boot_id=state.boot_id, object_uid=self._uid, term=self._facts.term, epoch=epoch.number
            )
            self._agents.submit(Send(pod.name, pod.uid, "leave", request))
        await self._agents.settle(LEAVE_SECONDS)


def _dump(model: Facts | Report) -> dict[str, Any]:
    """As the API server stores it: what is empty or None is left out, so that equal means equal."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _dump_names(model: type[Facts]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _matters(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a report has more to say than a message or a member's state."""

    def gist(one: dict[str, Any]) -> object:
        return (
            [(c["type"], c["status"]) for c in one.get("conditions", ())],
            one.get("version"),
            one.get("rounds"),
            one.get("observedGeneration"),
        )

    return gist(old) != gist(new)
