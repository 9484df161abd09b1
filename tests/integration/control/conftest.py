"""A bare API server, the real operator as a process with the chart's own rights, and fake agents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import ApiServer
from tests.integration.control.fake_agents import FakeAgent, Fleet, eventually

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "weightsync-system"
ACCOUNT = "weightsync-operator"


@pytest.fixture(scope="session")
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        server.apply(yaml.safe_load((ROOT / "crds/weightsync.dev_weightsyncs.yaml").read_text()))
        server.namespace(SYSTEM)
        server.service_account(SYSTEM, ACCOUNT)
        _rights(server)
        server.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev")
        yield server


def _rights(server: ApiServer) -> None:
    """Exactly the chart's rules: what is missing there fails here."""
    subject = [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": SYSTEM}]
    rbac = "rbac.authorization.k8s.io"
    for kind, file in (("ClusterRole", "cluster-rules"), ("Role", "own-rules")):
        rules = yaml.safe_load((ROOT / f"charts/weightsync/files/{file}.yaml").read_text())
        place: dict[str, Any] = {"name": ACCOUNT} | ({"namespace": SYSTEM} if kind == "Role" else {})
        server.apply(
            {"apiVersion": f"{rbac}/v1", "kind": kind, "metadata": place, "rules": rules},
            {
                "apiVersion": f"{rbac}/v1",
                "kind": f"{kind}Binding",
                "metadata": place,
                "roleRef": {"apiGroup": rbac, "kind": kind, "name": ACCOUNT},
                "subjects": subject,
            },
        )


class Operator:
    """The operator as a process."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self._config = api.write_kubeconfig(
            folder / "operator.kubeconfig", token=api.token(SYSTEM, ACCOUNT), namespace=SYSTEM
        )
        self.log = folder / "operator.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str, env: dict[str, str] | None = None) -> None:
        assert self._process is None
        command = [sys.executable, "-m", "weightsync_operator.main", "--all-namespaces", "--health-port=0"]
        path = os.pathsep.join([str(ROOT / "operator"), str(ROOT / "engine")])
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--lease-seconds=3", "--identity=test", *flags],
                env={
                    **os.environ,
                    "KUBECONFIG": str(self._config),
                    "PYTHONPATH": path,
                    **(env or {}),
                },
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL, as a node does it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> int:
        """SIGTERM, as a rollout does it; the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process = None

    def logged(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


@pytest.fixture
def operator(api: ApiServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Operator]:
    """Not started: a test does that when its pods are there. Its log is shown when the test fails."""
    process = Operator(api, tmp_path)
    yield process
    status = process.stop()
    print(process.logged()[-8000:])
    assert status == 0, "the operator did not end cleanly on SIGTERM"
    assert "Traceback" not in process.logged()


class World:
    """One namespace with one object, its pods and their agents."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api, self.namespace = api, api.namespace(namespace)
        self.fleet = Fleet(api.http.get("/openid/v1/jwks").json())
        self.path = f"/apis/weightsync.dev/v1alpha1/namespaces/{namespace}/weightsyncs/w"

    def object(self, **spec: Any) -> None:
        spec = {"retry": {"backoffSeconds": 1, "maxBackoffSeconds": 2}, **spec}
        self.api.apply(
            {
                "apiVersion": "weightsync.dev/v1alpha1",
                "kind": "WeightSync",
                "metadata": {"name": "w", "namespace": self.namespace},
                "spec": spec,
            }
        )

    def pod(
        self, name: str, agent: FakeAgent | None, role: str = "", *, gate: bool = True, port: int = 0
    ) -> str:
        """A Running pod whose agent is `agent`; its UID."""
        role = role or (agent.state.role if agent else "")
        spec: dict[str, Any] = {"labels": {"weightsync.dev/sync": "w", "weightsync.dev/role": role}}
        port = agent.port if agent else port
        spec["containers"] = [
            {"name": "main", "image": "none", "ports": [{"name": "weightsync", "containerPort": port}]}
        ]
        if role == "inference" and gate:
            spec["readinessGates"] = [{"conditionType": "weightsync.dev/in-sync"}]
        uid = str(self.api.pod(self.namespace, name, **spec)["metadata"]["uid"])
        if agent is not None:
            agent.namespace, agent.name = self.namespace, "w"
            self.fleet.change(lambda: agent.update(pod_name=name, pod_uid=uid))
        self.api.set_pod_status(self.namespace, name, ip="127.0.0.1")
        return uid

    def get(self) -> dict[str, Any]:
        answer = self.api.http.get(self.path)
        return answer.json() if answer.status_code == 200 else {}

    def status(self) -> dict[str, Any]:
        return dict(self.get().get("status", {}))

    def condition(self, kind: str) -> dict[str, Any]:
        for item in self.status().get("conditions", ()):
            if item["type"] == kind:
                return dict(item)
        return {}

    def wait_condition(
        self, kind: str, status: str, reason: str = "", within: float = 25.0
    ) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            item = self.condition(kind)
            return item if item.get("status") == status and reason in ("", item.get("reason")) else None

        try:
            return eventually(there, within=within) or {}
        except AssertionError:
            raise AssertionError(
                f"{kind} is not {status} {reason}: {self.status().get('conditions')}"
            ) from None

    def wait_version(self, version: str, within: float = 25.0) -> None:
        def there() -> bool:
            status = self.status()
            decision = status.get("decision", {})
            return status.get("version") == version and bool(decision.get("finished"))

        eventually(there, within=within)

    def gate(self, pod: str) -> dict[str, Any]:
        raw = self.api.http.get(f"/api/v1/namespaces/{self.namespace}/pods/{pod}").json()
        for item in raw.get("status", {}).get("conditions", ()):
            if item["type"] == "weightsync.dev/in-sync":
                return dict(item)
        return {}

    def events(self) -> list[dict[str, Any]]:
        answer = self.api.http.get(f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events")
        return list(answer.json()["items"])

    def close(self) -> None:
        """The object goes first, so that the operator of the next test finds nothing of this one."""
        self.fleet.close()
        self.api.http.patch(
            self.path,
            json={"metadata": {"finalizers": None}},
            headers={"Content-Type": "application/merge-patch+json"},
        )
        self.api.http.delete(self.path)


@pytest.fixture
def world(api: ApiServer, request: pytest.FixtureRequest) -> Iterator[World]:
    World.count = getattr(World, "count", 0) + 1  # type: ignore[attr-defined]
    made = World(api, f"t{World.count}")  # type: ignore[attr-defined]
    yield made
    made.close()
