"""Runs the demo: `python -m examples.demo up | down`. The cluster stays up, so that you can look around."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster, cluster_env_hint, host_env_image, host_python_volumes, obtain, operator_image
from tests.cluster.errors import ClusterError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NAME = "weightsync-demo"
NAMESPACE = "demo"
OPERATOR_NAMESPACE = "weightsync-system"
SERVERS = 2
VERSIONS = ("step-1", "step-2", "step-3")
LOGS = ROOT / "build" / "demo"


class DemoError(Exception):
    """A step that failed: what, why, and what to look at."""


class Clock:
    """Prints what is going on, and in the end what took how long."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self.started = time.monotonic()
        self.current = ""

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        self.current = what
        print(f"\n▸ {what}", flush=True)
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.phases.append((what, seconds))
        print(f"  done in {seconds:.1f} s", flush=True)

    def table(self) -> str:
        total = time.monotonic() - self.started
        rows = [*self.phases, ("all", total)]
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"  {what:<{width}}  {seconds:7.1f} s" for what, seconds in rows)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


# ---- manifests ---------------------------------------------------------------------------------------------


def on_host_python(document: dict[str, Any]) -> dict[str, Any]:
    """Let a workload's containers run this checkout's Python: volumes, paths, and vLLM's weights kept writable."""
    template = document.get("spec", {}).get("template")
    if template is None:
        return document
    volumes, mounts = host_python_volumes()
    pod = template["spec"]
    pod.setdefault("volumes", []).extend(volumes)
    pod["volumes"] += [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}},
    ]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container["command"] = [sys.executable if part == "python" else part for part in container["command"]]
        container["workingDir"] = str(HERE)
        container.setdefault("volumeMounts", []).extend(mounts)
        container["volumeMounts"] += [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        for variable in container.get("env", []):
            # vLLM's CPU build packs its weights away at load time; this test plugin keeps them where they are.
            if variable["name"] == "VLLM_PLUGINS":
                variable["value"] += ",live_weights"
    return document


def manifests() -> list[dict[str, Any]]:
    documents = [d for d in yaml.safe_load_all((HERE / "manifests.yaml").read_text()) if d]
    return [on_host_python(d) for d in documents]


# ---- steps -------------------------------------------------------------------------------------------------


def install_operator(cluster: Cluster) -> None:
    archive, reference = operator_image()
    cluster.load_image(archive)
    repository, tag = reference.rsplit(":", 1)
    cluster.helm(
        "upgrade", "--install", "weightsync", str(ROOT / "charts" / "weightsync"),
        "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s",
        "--set", f"image.repository={repository},image.tag={tag},image.pullPolicy=IfNotPresent",
    )  # fmt: skip


def start_workloads(cluster: Cluster) -> None:
    archive, _ = host_env_image()
    cluster.load_image(archive)
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    ))  # fmt: skip
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=yaml.safe_dump_all(manifests()))


def wait_until(what: str, check: Any, seconds: float, every: float = 1.0) -> Any:
    """Poll `check` until it returns something true; tell once in a while what it said last."""
    deadline = time.monotonic() + seconds
    told = time.monotonic()
    last: Any = None
    while time.monotonic() < deadline:
        done, last = check()
        if done:
            return last
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"waiting for {what}: {last}")
        time.sleep(every)
    raise DemoError(f"{what} did not happen within {seconds:.0f} s; last seen: {last}")


def conditions(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Condition type -> condition of the WeightSync object."""
    text = cluster.kubectl("-n", NAMESPACE, "get", "wsync", "demo", "-o", "json")
    return {c["type"]: c for c in json.loads(text).get("status", {}).get("conditions", [])}


def servers_ready(cluster: Cluster) -> tuple[bool, str]:
    pods = json.loads(cluster.kubectl("-n", NAMESPACE, "get", "pods", "-l", "app=vllm", "-o", "json"))["items"]
    ready = sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        for pod in pods
    )
    trouble = next((c["message"] for c in conditions(cluster).values() if c["type"] == "Ready"), "no status yet")
    return ready == SERVERS, f"{ready} of {SERVERS} vLLM pods Ready; the object says: {trouble}"


def trainer_lines(cluster: Cluster) -> list[dict[str, Any]]:
    out = []
    for line in cluster.kubectl("-n", NAMESPACE, "logs", "trainer-0", "--tail=200").splitlines():
        if line.startswith("{"):
            out.append(json.loads(line))
    return out


def round_trip(cluster: Cluster, version: str) -> None:
    """Publish `version`, wait until it is committed, and compare both servers' tokens with transformers'."""
    cluster.kubectl("-n", NAMESPACE, "exec", "trainer-0", "--", sys.executable, "-c",
                    f"import pathlib; p = pathlib.Path('/tmp/go'); p.mkdir(exist_ok=True); (p / {version!r}).touch()")  # fmt: skip

    def committed() -> tuple[bool, Any]:
        lines = trainer_lines(cluster)
        done = [x for x in lines if x.get("committed") == version]
        want = [x for x in lines if x.get("greedy") == version]
        published = [x for x in lines if x.get("published") == version]
        if done and want:
            return True, (done[0], want[0], published[0])
        return False, conditions(cluster).get("Ready", {}).get("message", "not published yet")

    done, want, published = wait_until(f"{version} to be committed", committed, 180, every=0.5)
    say(f"publish returned after {published['publish_ms']} ms; committed {done['seconds']} s after it was called")
    prompt = ",".join(str(t) for t in want["prompt"])
    text = cluster.kubectl(
        "-n", NAMESPACE, "exec", "trainer-0", "--",
        sys.executable, str(HERE / "ask.py"), "http://vllm:8000", str(SERVERS), prompt, str(len(want["tokens"])),
        timeout=120,
    )  # fmt: skip
    answers: dict[str, dict[str, Any]] = json.loads(text)
    say(f"{'transformers':<24} {version:<8} {want['tokens']}")
    for pod, answer in sorted(answers.items()):
        say(f"{pod:<24} {answer['version']:<8} {answer['tokens']}")
    wrong = [p for p, a in answers.items() if a["tokens"] != want["tokens"] or a["version"] != version]
    if wrong or len(answers) != SERVERS:
        raise DemoError(f"{version}: {', '.join(wrong) or 'a server'} did not answer with the published weights")
    say("equal ✓")


def show(cluster: Cluster) -> None:
    print()
    print(cluster.kubectl("-n", NAMESPACE, "get", "wsync"))
    description = cluster.kubectl("-n", NAMESPACE, "describe", "wsync", "demo")
    print(description[description.index("Status:") :] if "Status:" in description else description)


def keep_logs(cluster: Cluster) -> None:
    """What a person needs after a failure, in files."""
    LOGS.mkdir(parents=True, exist_ok=True)
    wanted = {
        "object.txt": ("-n", NAMESPACE, "describe", "wsync"),
        "pods.txt": ("-n", NAMESPACE, "describe", "pods"),
        "events.txt": ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        "trainer.log": ("-n", NAMESPACE, "logs", "-l", "app=trainer", "--prefix", "--tail=-1"),
        "vllm.log": ("-n", NAMESPACE, "logs", "-l", "app=vllm", "--prefix", "--tail=-1"),
        "operator.log": ("-n", OPERATOR_NAMESPACE, "logs", "deploy/weightsync-operator", "--tail=-1"),
    }
    for name, arguments in wanted.items():
        try:
            (LOGS / name).write_text(cluster.kubectl(*arguments))
        except ClusterError as error:
            (LOGS / name).write_text(f"not to be had: {error}\n")


def up() -> int:
    clock = Clock()
    cluster: Cluster | None = None
    try:
        with clock.phase("cluster"):
            cluster = obtain(name=NAME, workers=1)
            say(f"context {cluster.context} ({cluster.kind_of})")
        with clock.phase("operator: image and helm install"):
            install_operator(cluster)
        with clock.phase("trainer (2 ranks, FSDP2) and vLLM (2 pods): start"):
            start_workloads(cluster)
            wait_until("both vLLM servers", lambda: servers_ready(cluster), 420)
        for version in VERSIONS:
            with clock.phase(f"round {version}"):
                round_trip(cluster, version)
                print(cluster.kubectl("-n", NAMESPACE, "get", "wsync"), end="")
    except (DemoError, ClusterError) as error:
        print(f"\n✗ failed: {clock.current}\n  {error}", file=sys.stderr)
        if cluster is not None:
            keep_logs(cluster)
            print(f"  logs of all parts: {LOGS}", file=sys.stderr)
            print("  the cluster is still there to look at; `make demo-down` removes it", file=sys.stderr)
        return 1
    show(cluster)
    print("time of every phase:")
    print(clock.table())
    print(f"""
look around:
  {cluster_env_hint(cluster)}
  kubectl -n {NAMESPACE} get wsync,pods
  kubectl -n {NAMESPACE} describe wsync demo
  kubectl -n {NAMESPACE} logs trainer-0
  kubectl -n {OPERATOR_NAMESPACE} logs deploy/weightsync-operator
remove everything: make demo-down""")
    return 0


def down() -> int:
    from tests.cluster import remove

    remove(NAME)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("command", choices=["up", "down"])
    sys.exit({"up": up, "down": down}[parser.parse_args().command]())
