"""The operator without a cluster: its reconciler and agents' connections as they are, over an object and pods that are
kept here instead of in an API server."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from weightsync_engine.protocol.names import CONTAINER_PORT_NAME, GATE_IN_SYNC, LABEL_ROLE, LABEL_SYNC
from weightsync_operator.adapters.agents import Agents, session
from weightsync_operator.adapters.kube import KubeError
from weightsync_operator.adapters.reconcile import Reconciler
from weightsync_operator.api.types import WeightSyncSpec

NAMESPACE, NAME = "rl", "policy"
log = logging.getLogger(__name__)


class _Object:
    """The object as the reconciler reads and writes it; status fields belong to their managers, as with server-side
    apply."""

    def __init__(self) -> None:
        self.uid = str(uuid.uuid4())
        self._fields: dict[str, dict[str, Any]] = {}
        self._version = 1
        self.gates: dict[str, str] = {}
        self.on_status: Callable[[dict[str, Any]], None] = lambda status: None

    @property
    def status(self) -> dict[str, Any]:
        return {k: v for fields in self._fields.values() for k, v in fields.items()}

    async def get_object(self, namespace: str, name: str) -> dict[str, Any]:
        return {"metadata": {"uid": self.uid, "resourceVersion": str(self._version)}, "status": self.status}

    async def apply_status(
        self, namespace: str, name: str, uid: str, status: Any, manager: str, version: str | None = None
    ) -> dict[str, Any]:
        if version is not None and version != str(self._version):
            raise KubeError(409, "the object has changed")
        self._fields[manager] = dict(status)
        self._version += 1
        self.on_status(self.status)
        return await self.get_object(namespace, name)

    async def set_gate(self, namespace: str, change: Any, wall: Any) -> dict[str, Any]:
        self.gates[change.pod] = "True" if change.status else "False"
        return {}

    async def event(self, namespace: str, name: str, uid: str, note: Any, wall: Any, instance: str) -> None:
        log.info("%s %s: %s", note.type, note.reason, note.message)


class _Tokens:
    def __init__(self, sign: Callable[[], str]) -> None:
        self._sign, self._until, self._token = sign, 0.0, ""

    async def get(self, namespace: str, name: str) -> str:
        if time.monotonic() > self._until:
            self._token, self._until = self._sign(), time.monotonic() + 300
        return self._token

    def distrust(self, namespace: str, name: str) -> None:
        self._until = 0.0


class Control:
    """`with Control(...)`: the operator's loop for one object in a thread. Pods are added and removed by name."""

    def __init__(self, sign: Callable[[], str], spec: dict[str, Any]) -> None:
        self.object = _Object()
        self.object.on_status = self._on_status
        self.apply(spec)
        self._sign = sign
        self._pods: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._committed: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._poke()
        self._thread.join(15)

    def apply(self, spec: dict[str, Any]) -> None:
        """From the next step of the loop on."""
        self._spec = WeightSyncSpec.model_validate(spec)

    def add(self, name: str, role: str, port: int) -> None:
        """A pod as the API server shows it; of a name that there is already, another pod takes the place."""
        port_ = {"name": CONTAINER_PORT_NAME, "containerPort": port}
        self._pods[name] = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}-{next(self._numbers)}",
                "labels": {LABEL_SYNC: NAME, LABEL_ROLE: role},
            },
            "spec": {
                "containers": [{"ports": [port_]}],
                "readinessGates": [{"conditionType": GATE_IN_SYNC}] if role == "inference" else [],
            },
            "status": {"phase": "Running", "podIP": "127.0.0.1"},
        }
        self._poke()

    def remove(self, name: str) -> None:
        self._pods.pop(name)
        self._poke()

    def uid(self, name: str) -> str:
        return str(self._pods[name]["metadata"]["uid"])

    def wait(self, holds: Callable[[dict[str, Any]], bool], seconds: float, what: str) -> float:
        """Until the status is so; the time (monotonic) at which that was seen. Raises TimeoutError with the status."""
        with self._changed:
            if not self._changed.wait_for(lambda: holds(self.object.status), seconds):
                status = self.object.status
                said = [f"{c['type']} {c['status']} {c['message']}" for c in status.get("conditions", ())]
                raise TimeoutError(f"not within {seconds:g} s: {what}; {'; '.join(said)}")
        return time.perf_counter()

    def wait_committed(self, version: str, seconds: float) -> float:
        """When (`time.perf_counter`) the fleet was all in this version."""
        self.wait(lambda status: version in self._committed, seconds, f"{version} in every server")
        return self._committed[version]

    def wait_true(self, condition: str, seconds: float) -> float:
        return self.wait(
            lambda status: any(
                c["type"] == condition and c["status"] == "True" for c in status.get("conditions", ())
            ),
            seconds,
            f"{condition} is True",
        )

    def _on_status(self, status: dict[str, Any]) -> None:
        with self._changed:
            decision = status.get("decision")
            if decision and decision.get("finished") and decision["version"] not in self._committed:
                self._committed[decision["version"]] = time.perf_counter()
            self._changed.notify_all()

    def _poke(self) -> None:
        if self._loop is not None and self._wake is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        self._wake, self._loop = asyncio.Event(), asyncio.get_running_loop()
        async with session() as http:
            agents = Agents(http, _Tokens(self._sign), NAMESPACE, NAME, self._wake.set)  # type: ignore[arg-type]
            reconciler = Reconciler(self.object, agents, NAMESPACE, NAME, self.object.uid)  # type: ignore[arg-type]
            while not self._stop:
                self._wake.clear()
                try:
                    seconds = await reconciler.step(self._spec, 1, lambda: list(self._pods.values()))
                except Exception:
                    log.exception("the reconciler's step")
                    seconds = 1.0
                with_limit = asyncio.wait_for(self._wake.wait(), max(seconds, 0.0))
                try:
                    await with_limit
                except TimeoutError:
                    pass
            await agents.close()
