"""The demo's trainer, vLLM servers and WeightSync object in a cluster: start them, publish, ask, look.

The e2e tests drive the same fleet, so that what the demo shows is what is tested.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tests.cluster import Cluster, ClusterError, host_env_image, host_python_volumes, operator_image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OPERATOR_NAMESPACE = "weightsync-system"
T = TypeVar("T")


class FleetError(Exception):
    """Something did not happen: what, for how long it was waited, and what was seen last."""


def wait_until(
    what: str,
    check: Callable[[], tuple[T | None, object]],
    seconds: float,
    every: float = 0.5,
    tell: Callable[[str], None] | None = None,
) -> T:
    """Poll `check` -> (result or None, what it saw) until there is a result; `tell` hears of a long wait.

    Raises FleetError after `seconds`. A ClusterError inside `check` counts as not yet.
    """
    deadline = time.monotonic() + seconds
    told = time.monotonic()
    seen: object = "nothing"
    while time.monotonic() < deadline:
        try:
            result, seen = check()
        except ClusterError as error:
            result, seen = None, error
        if result is not None:
            return result
        if tell is not None and time.monotonic() - told > 10:
            told = time.monotonic()
            tell(textwrap.shorten(f"waiting for {what}: {seen}", 200, placeholder=" ..."))
        time.sleep(every)
    raise FleetError(f"{what} did not happen within {seconds:.0f} s; last seen: {seen}")


def install_operator(cluster: Cluster, *settings: str) -> None:
    """Pack the operator's image, load it, and install the chart; `settings` are further `--set` values."""
    image = operator_image()
    cluster.load_image(image.archive)
    repository, tag = image.ref.rsplit(":", 1)
    values = [
        f"image.repository={repository}",
        f"image.tag={tag}",
        "image.pullPolicy=IfNotPresent",
        *settings,
    ]
    cluster.helm(
        "upgrade", "--install", "weightsync", str(ROOT / "charts" / "weightsync"),
        "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s",
        "--set", ",".join(values),
    )  # fmt: skip


CACHE = "/var/cache/vllm"
"""On the node: to find out anew what vLLM knows of a model's class takes every server a process and half a minute."""


def on_host_python(document: dict[str, Any]) -> dict[str, Any]:
    """Let a workload's containers run this checkout's Python: volumes, paths, and vLLM's weights kept writable."""
    template = document.get("spec", {}).get("template")
    if template is None:
        return document
    volumes, mounts = host_python_volumes()
    pod = template["spec"]
    pod.setdefault("volumes", []).extend(volumes)
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container["command"] = [sys.executable if part == "python" else part for part in container["command"]]
        container["workingDir"] = str(HERE)
        container.setdefault("volumeMounts", []).extend(mounts)
        container["image"] = host_env_image().ref
        plugins = next((v for v in container.get("env", []) if v["name"] == "VLLM_PLUGINS"), None)
        if plugins is not None:
            # vLLM's CPU build packs its weights away at load time; this test plugin keeps them where they are.
            plugins["value"] += ",vllm_live_weights"
            container["env"].append({"name": "VLLM_CACHE_ROOT", "value": CACHE})
            container["volumeMounts"].append({"name": "cache", "mountPath": CACHE})
            pod["volumes"].append({"name": "cache", "hostPath": {"path": CACHE, "type": "DirectoryOrCreate"}})
    return document


@dataclass(frozen=True)
class Answer:
    """What one server said: the version it claims, and the tokens."""

    version: str
    tokens: list[int]


@dataclass(frozen=True)
class Publication:
    """What the training loop printed about one version."""

    version: str
    publish_ms: float
    """From the call of `publish` to its return."""
    seconds: float
    """From the call of `publish` to the commit."""
    prompt: list[int]
    tokens: list[int]
    """What transformers generates from the published weights."""


@dataclass(frozen=True)
class Fleet:
    """Two trainer pods, `servers` vLLM pods and the object `demo`, in a namespace of their own."""

    cluster: Cluster
    namespace: str = "demo"
    servers: int = 2
    versions: int = 3
    """How many versions the training loop publishes: step-1, step-2, ..."""
    transfer_seconds: int | None = None
    """The object's deadline for a transfer; None: the default."""

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, input=input, timeout=timeout)

    def start(self) -> None:
        self.cluster.load_image(host_env_image().archive)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}}
        self.cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(namespace))
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(self.manifests()))

    def manifests(self) -> list[dict[str, Any]]:
        documents = [d for d in yaml.safe_load_all((HERE / "manifests.yaml").read_text()) if d]
        for document in documents:
            if document["kind"] == "StatefulSet":
                command = document["spec"]["template"]["spec"]["containers"][0]["command"]
                command[:] = [c for c in command if not c.startswith("step-")]
                command += [f"step-{i + 1}" for i in range(self.versions)]
            if document["kind"] == "WeightSync" and self.transfer_seconds is not None:
                document["spec"]["deadlines"] = {"transferSeconds": self.transfer_seconds}
        return [on_host_python(d) for d in documents]

    def plain_python_pod(self, *arguments: str) -> dict[str, Any]:
        """Spec of a pod that runs this checkout's Python with these arguments, and nothing of weightsync."""
        container = {"name": "main", "command": ["python", *arguments]}
        workload = {"spec": {"template": {"spec": {"containers": [container]}}}}
        spec: dict[str, Any] = on_host_python(workload)["spec"]["template"]["spec"]
        return {**spec, "terminationGracePeriodSeconds": 1, "enableServiceLinks": False}

    def stop(self) -> None:
        """Remove the namespace with all that is in it."""
        self.cluster.kubectl(
            "delete", "namespace", self.namespace, "--ignore-not-found", "--wait=true", timeout=120
        )

    def pods(self, app: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(
            self.kubectl("get", "pods", "-l", f"app={app}", "-o", "json")
        )["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.kubectl("get", "wsync", "demo", "-o", "json")).get(
            "status", {}
        )
        return status

    def condition(self, kind: str) -> dict[str, str]:
        """The object's condition of that type; a stand-in with status Unknown before the first visit."""
        none = {
            "type": kind,
            "status": "Unknown",
            "reason": "NoStatus",
            "message": "the operator has not written it yet",
        }
        return next((c for c in self.status().get("conditions", []) if c["type"] == kind), none)

    def ready_pods(self, app: str) -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in self.pods(app)
            if any(
                c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", [])
            )
        ]

    def wait_servers_ready(self, seconds: float = 420, tell: Callable[[str], None] | None = None) -> None:
        def check() -> tuple[bool | None, object]:
            ready = self.ready_pods("vllm")
            seen = f"{len(ready)} of {self.servers} vLLM pods Ready; {self.condition('Ready')['message']}"
            return len(ready) == self.servers or None, seen

        wait_until("both vLLM servers Ready", check, seconds, tell=tell)

    def say_go(self, version: str) -> None:
        """Let the training loop publish `version`, its next one."""
        script = (
            f"import pathlib; p = pathlib.Path('/tmp/go'); p.mkdir(exist_ok=True); (p / {version!r}).touch()"
        )
        self.kubectl("exec", "trainer-0", "--", sys.executable, "-c", script)

    def trainer_lines(self) -> list[dict[str, Any]]:
        lines = self.kubectl("logs", "trainer-0", "--tail=-1").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_committed(
        self, version: str, seconds: float = 180, tell: Callable[[str], None] | None = None
    ) -> Publication:
        def check() -> tuple[Publication | None, object]:
            found = {
                key: x
                for x in self.trainer_lines()
                for key in ("published", "greedy", "committed")
                if x.get(key) == version
            }
            if len(found) < 3:
                return None, f"{', '.join(found) or 'not published'}; {self.condition('Ready')['message']}"
            return Publication(
                version=version,
                publish_ms=found["published"]["publish_ms"],
                seconds=found["committed"]["seconds"],
                prompt=found["greedy"]["prompt"],
                tokens=found["greedy"]["tokens"],
            ), ""

        return wait_until(f"the commit of {version}", check, seconds, tell=tell)

    def ask(
        self, publication: Publication, seconds: float = 60, servers: int | None = None
    ) -> dict[str, Answer]:
        """Every server's answer to the publication's prompt, through the Service. Pod name -> answer."""
        text = self.kubectl(
            "exec", "trainer-0", "--", sys.executable, str(HERE / "ask.py"), "http://vllm:8000",
            str(servers or self.servers),
            ",".join(map(str, publication.prompt)), str(len(publication.tokens)), str(seconds),
            timeout=seconds + 30,
        )  # fmt: skip
        return {pod: Answer(**answer) for pod, answer in json.loads(text).items()}

    def compare(
        self, version: str, tell: Callable[[str], None] | None = None
    ) -> tuple[Publication, dict[str, Answer]]:
        """Wait for the commit of a version that was published; both servers must answer as transformers does."""
        publication = self.wait_committed(version, tell=tell)
        answers = self.ask(publication)
        wrong = sorted(p for p, a in answers.items() if a != Answer(version, publication.tokens))
        if wrong or len(answers) != self.servers:
            raise FleetError(
                f"after the commit of {version}, {', '.join(wrong) or 'a missing server'} did not answer with its "
                f"weights: expected {publication.tokens}, got {answers}"
            )
        return publication, answers

    def keep_logs(self, folder: Path) -> None:
        """What a person needs after a failure, in files."""
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            "object.txt": ("-n", self.namespace, "describe", "wsync"),
            "pods.txt": ("-n", self.namespace, "describe", "pods"),
            "events.txt": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
            "trainer.log": ("-n", self.namespace, "logs", "-l", "app=trainer", "--prefix", "--tail=-1"),
            "vllm.log": ("-n", self.namespace, "logs", "-l", "app=vllm", "--prefix", "--tail=-1"),
            "operator.log": ("-n", OPERATOR_NAMESPACE, "logs", "deploy/weightsync-operator", "--tail=-1"),
        }
        for name, arguments in wanted.items():
            try:
                (folder / name).write_text(self.cluster.kubectl(*arguments))
            except ClusterError as error:
                (folder / name).write_text(f"not to be had: {error}\n")
