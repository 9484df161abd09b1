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
from tests.cluster.binaries import binaries
from tests.integration.control.fake_agents import FakeAgent, Fleet, eventually

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "weightsync"
SYSTEM = "weightsync-system"
ACCOUNT = "weightsync-operator"


@pytest.fixture(scope="session")
def api() -> Iterator[ApiServer]:
    """With the chart installed as helm renders it: a right that is missing there fails the tests here."""
    with ApiServer() as server:
        for crd in sorted((CHART / "crds").iterdir()):
            server.apply(yaml.safe_load(crd.read_text()))
        server.kubectl("wait", "--for=condition=Established", "crd/weightsyncs.weightsync.dev")
        server.namespace(SYSTEM)
        server.apply(*render(SYSTEM))
        yield server


def render(namespace: str, *sets: str) -> list[dict[str, Any]]:
    """The chart's objects, as `helm install --namespace` would create them."""
    flags = [flag for value in sets for flag in ("--set", value)]
    helm = str(binaries("helm")["helm"])
    done = subprocess.run(
        [helm, "template", "wsync", str(CHART), "--namespace", namespace, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


class Operator:
    """The operator as a process."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self._config = api.write_kubeconfig(
            folder / "operator.kubeconfig", token=api.token(SYSTEM, ACCOUNT), namespace=SYSTEM
        )
        self.log = folder / "operator.log"
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.poll() is None, f"the operator ended by itself:\n{self.logged()[-2000:]}"

    def start(self, *flags: str) -> None:
        assert self._process is None
        command = [sys.executable, "-m", "weightsync_operator.main", "--all-namespaces", "--health-port=0"]
        path = os.pathsep.join([str(ROOT / "operator"), str(ROOT / "engine")])
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # A Lease long enough for an API server that restarts.
                [*command, "--lease-seconds=60", "--identity=test", *flags],
                env={
                    **os.environ,
                    "KUBECONFIG": str(self._config),
                    "PYTHONPATH": path,
                    # A proxy of the environment has no business between operator and pods.
                    "HTTP_PROXY": "http://127.0.0.1:1",
                    "http_proxy": "http://127.0.0.1:1",
                    "NO_PROXY": "",
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


@pytest.fixture(scope="session")
def _process(api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    process = Operator(api, tmp_path_factory.mktemp("operator"))
    yield process
    assert process.stop() == 0, "the operator did not end cleanly on SIGTERM"


@pytest.fixture
def operator(_process: Operator) -> Iterator[Operator]:
    """Running; its log is shown when the test fails. A test that kills it may start it again."""
    already = len(_process.logged())
    _process.ensure()
    yield _process
    log = _process.logged()[already:]
    print(log[-8000:])
    assert "Traceback" not in log


@pytest.fixture
def no_operator(_process: Operator) -> None:
    """None writes to objects while the test does."""
    _process.stop()


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
        """The object goes first, so that nothing of it disturbs the next test."""
        try:
            self.api.http.delete(self.path)
            eventually(lambda: not self.get(), within=10)
        finally:
            self.strip()
            self.fleet.close()

    def strip(self) -> None:
        """Removes the finalizer by hand."""
        self.api.http.patch(
            self.path,
            json={"metadata": {"finalizers": None}},
            headers={"Content-Type": "application/merge-patch+json"},
        )


@pytest.fixture
def world(api: ApiServer, request: pytest.FixtureRequest) -> Iterator[World]:
    World.count = getattr(World, "count", 0) + 1  # type: ignore[attr-defined]
    made = World(api, f"t{World.count}")  # type: ignore[attr-defined]
    yield made
    made.close()
