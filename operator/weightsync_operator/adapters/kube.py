"""The few Kubernetes calls that the operator makes, on `kubernetes.aio`'s client, with a deadline on each."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
from kubernetes.aio import client, config

from weightsync_engine.protocol.names import (
    CONTAINER_PORT_NAME,
    DEFAULT_INFERENCE_PORT,
    DEFAULT_TRAINER_PORT,
    GATE_IN_SYNC,
    GROUP,
    LABEL_ROLE,
    LABEL_SYNC,
    ROLE_TRAINER,
)

from .. import names
from ..core.members import AgentView, Gate, Pod
from ..core.rounds import EventNote, GateChange

_LOG = logging.getLogger(__name__)
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"


class KubeError(Exception):
    """The API server refused: nothing was changed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class KubeUnavailable(Exception):
    """No clear answer: a write may have been done, or may still be done."""


class Kube:
    """Calls with the operator's own account."""

    def __init__(self, api: client.ApiClient, *, timeout: float = 10.0) -> None:
        self._api = api
        self._timeout = timeout

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> Kube:
        """From the pod's service account, else from a kubeconfig (default: that of the environment).

        Raises kubernetes' ConfigException when there is neither.
        """
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        return cls(client.ApiClient(configuration))

    async def close(self) -> None:
        await self._api.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """One call. Raises KubeError for a refusal and KubeUnavailable when it is unclear what became of
        it."""
        try:
            async with asyncio.timeout(self._timeout):
                call = await self._api.param_serialize(
                    method,
                    path,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                )
                response = await self._api.call_api(*call, _request_timeout=self._timeout)
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        try:
            answer = json.loads(raw) if raw else {}
        except ValueError as error:
            raise KubeUnavailable(f"{method} {path}: HTTP {response.status}, no JSON") from error
        if response.status >= 500 or response.status == 429:
            raise KubeUnavailable(f"{method} {path}: HTTP {response.status}: {answer.get('message', '')}")
        if response.status >= 400:
            raise KubeError(response.status, f"{method} {path}: {answer.get('message', '')}")
        return dict(answer)

    # ---- the object ----------------------------------------------------------------------------------------

    def _object_path(self, namespace: str, name: str) -> str:
        return f"/apis/{GROUP}/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{name}"

    async def get_object(self, namespace: str, name: str) -> dict[str, Any]:
        return await self.request("GET", self._object_path(namespace, name))

    async def apply_status(
        self,
        namespace: str,
        name: str,
        uid: str,
        status: Mapping[str, Any],
        manager: str,
        resource_version: str | None = None,
    ) -> dict[str, Any]:
        """Server-side apply of all the status fields of one manager.

        With a resourceVersion it is a compare-and-swap: KubeError 409 when the object has changed since.
        """
        metadata = {"name": name, "namespace": namespace, "uid": uid}
        if resource_version is not None:
            metadata["resourceVersion"] = resource_version
        return await self.request(
            "PATCH",
            self._object_path(namespace, name) + "/status",
            body={
                "apiVersion": f"{GROUP}/{names.API_VERSION}",
                "kind": names.KIND,
                "metadata": metadata,
                "status": dict(status),
            },
            query={"fieldManager": manager, "force": "true"},
            content_type=_APPLY,
        )

    # ---- pods ----------------------------------------------------------------------------------------------

    async def list_pods(self, namespace: str, name: str) -> list[dict[str, Any]]:
        answer = await self.request(
            "GET",
            f"/api/v1/namespaces/{namespace}/pods",
            query={"labelSelector": f"{LABEL_SYNC}={name}"},
        )
        return list(answer.get("items", []))

    async def set_gate(self, namespace: str, change: GateChange, wall: datetime.datetime) -> dict[str, Any]:
        """Our one condition on a pod, by server-side apply: other conditions stay; another pod of the name is
        refused (KubeError 409 or 422), a vanished one too (404)."""
        condition = {
            "type": GATE_IN_SYNC,
            "status": "True" if change.status else "False",
            "reason": change.reason,
            "message": change.message,
            "lastTransitionTime": wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        return await self.request(
            "PATCH",
            f"/api/v1/namespaces/{namespace}/pods/{change.pod}/status",
            body={
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": change.pod, "namespace": namespace, "uid": change.uid},
                "status": {"conditions": [condition]},
            },
            query={"fieldManager": names.MANAGER_GATE, "force": "true"},
            content_type=_APPLY,
        )

    # ---- events --------------------------------------------------------------------------------------------

    async def event(
        self,
        namespace: str,
        name: str,
        uid: str,
        note: EventNote,
        wall: datetime.datetime,
        instance: str,
        *,
        count: int = 1,
    ) -> None:
        """An event on the object that stands for `count` occurrences; the same one again adds to its count."""
        digest = hashlib.sha256(f"{uid}/{note.type}/{note.reason}/{note.message}".encode()).hexdigest()[:16]
        path = f"/apis/events.k8s.io/v1/namespaces/{namespace}/events"
        stamp = wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        event = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{digest}", "namespace": namespace},
            "eventTime": stamp,
            "type": note.type,
            "reason": note.reason,
            "action": "Reconcile",
            "note": note.message[:1000],
            "regarding": {
                "apiVersion": f"{GROUP}/{names.API_VERSION}",
                "kind": names.KIND,
                "name": name,
                "namespace": namespace,
                "uid": uid,
            },
            "reportingController": names.REPORTING_CONTROLLER,
            "reportingInstance": instance[:128],
        }
        if count > 1:
            event["series"] = {"count": count, "lastObservedTime": stamp}
        try:
            await self.request("POST", path, body=event)
            return
        except KubeError as error:
            if error.status != 409:
                raise
        path = f"{path}/{name}.{digest}"
        before = ((await self.request("GET", path)).get("series") or {}).get("count", 1)
        series = {"count": before + count, "lastObservedTime": stamp}
        await self.request("PATCH", path, body={"series": series}, content_type=_MERGE)


def pod_of(raw: Mapping[str, Any], agent: AgentView) -> Pod:
    """What the planner needs of a pod as the API server shows it."""
    metadata, spec, status = raw.get("metadata", {}), raw.get("spec", {}), raw.get("status", {})
    role = metadata.get("labels", {}).get(LABEL_ROLE, "")
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    gate = conditions.get(GATE_IN_SYNC)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        phase=status.get("phase", ""),
        ip=status.get("podIP", ""),
        port=agent_port(spec, role),
        terminating="deletionTimestamp" in metadata,
        containers_ready=conditions.get("ContainersReady", {}).get("status") == "True",
        has_gate=any(item.get("conditionType") == GATE_IN_SYNC for item in spec.get("readinessGates") or ()),
        gate=None if gate is None else Gate(gate.get("status") == "True", gate.get("reason", "")),
        agent=agent,
    )


def agent_port(spec: Mapping[str, Any], role: str) -> int:
    """The container port named for us, else the default of the role."""
    # A sidecar in the form of an init container may declare it too.
    for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
        for port in container.get("ports") or ():
            if port.get("name") == CONTAINER_PORT_NAME:
                return int(port["containerPort"])
    return DEFAULT_TRAINER_PORT if role == ROLE_TRAINER else DEFAULT_INFERENCE_PORT
