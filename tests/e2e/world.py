"""The fleet under test, seen from outside: nodes, processes, the object's history, and what the witness heard.

Parts are hit from their node (`docker exec`), as a process of the pod itself can neither kill nor stop its pid 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.fleet import (
    HERE,
    OPERATOR_NAMESPACE,
    Fleet,
    FleetError,
    install_operator,
    on_host_python,
    wait_until,
)
from tests.cluster import Cluster

from .judge import LOADED, Heard
from .matrix import DEADLINES

NAMESPACE = "faults"
KEEP = bool(os.environ.get("WEIGHTSYNC_KEEP_FLEET"))
"""The fleet is left for the next session, which goes on with it as it is: what has changed since is not installed."""
E2E = Path(__file__).resolve().parent
CHAIN = "WS-FAULT"
"""All that a cut network consists of is in this chain of iptables: to flush it is to heal."""
TOKENS = 6
PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]
SERVERS = 2


@dataclass(frozen=True)
class Longest:
    """Of some training steps."""

    step_ms: float
    stall_ms: float
    """Without the time in which no core was free for it."""


# ---- what runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultFleet(Fleet):
    """The demo's fleet with a loop that never waits, short deadlines, one server on each of two nodes, a witness."""

    home: str = ""
    """The node of all but the victim server."""

    def manifests(self) -> list[dict[str, Any]]:
        documents = super().manifests()
        for document in documents:
            match document["kind"]:
                case "StatefulSet":
                    self._loop(document["spec"]["template"]["spec"])
                case "Deployment":
                    self._spread(document["spec"]["template"]["spec"])
                case "WeightSync":
                    document["spec"]["deadlines"] = {
                        "joinSeconds": DEADLINES.join,
                        "prepareSeconds": DEADLINES.prepare,
                        "transferSeconds": DEADLINES.transfer,
                        "commitSeconds": DEADLINES.commit,
                    }
                    document["spec"]["retry"] = {"backoffSeconds": 1, "maxBackoffSeconds": 8}
        return [*documents, self._witness()]

    def _loop(self, pod: dict[str, Any]) -> None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": self.home}
        pod["terminationGracePeriodSeconds"] = 1
        container = pod["containers"][0]
        container["command"][-1 - self.versions :] = [str(E2E / "loop.py")]
        container["env"].append({"name": "PYTHONPATH", "value": str(HERE)})
        # The machine is small: a server that starts must not be what stalls the training.
        container["resources"] = {"requests": {"cpu": "200m"}}

    @staticmethod
    def _spread(pod: dict[str, Any]) -> None:
        pod["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"app": "vllm"}},
                "matchLabelKeys": ["pod-template-hash"],
                "nodeTaintsPolicy": "Honor",
            }
        ]
        pod["terminationGracePeriodSeconds"] = 2
        # Nodes that freeze for a minute are part of the tests; being evicted from them is not.
        pod["tolerations"] = [
            {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
            for why in ("not-ready", "unreachable")
        ]

    def _witness(self) -> dict[str, Any]:
        arguments = [
            "-u",
            str(E2E / "witness.py"),
            "http://vllm:8000",
            ",".join(map(str, PROMPT)),
            str(TOKENS),
        ]
        container = {
            "name": "witness",
            "command": ["python", *arguments],
            "env": [{"name": "PYTHONPATH", "value": str(HERE)}],
        }
        workload = {"spec": {"template": {"spec": {"containers": [container]}}}}
        spec = on_host_python(workload)["spec"]["template"]["spec"]
        spec |= {
            "terminationGracePeriodSeconds": 1,
            "enableServiceLinks": False,
            "nodeSelector": {"kubernetes.io/hostname": self.home},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "witness", "labels": {"app": "witness"}},
            "spec": spec,
        }


# ---- nodes and processes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    node: str
    pid: int
    name: str
    command: str


_LIST = r"""
for pid in $(grep -lsE '%s' /proc/[0-9]*/cgroup | cut -d/ -f3); do
  name=$(cat /proc/$pid/comm 2>/dev/null)
  command=$(tr '\0' ' ' < /proc/$pid/cmdline 2>/dev/null | cut -c1-160)
  printf '%%s\t%%s\t%%s\n' "$pid" "$name" "$command"
done
"""


@dataclass(frozen=True)
class Nodes:
    """The nodes as containers: what is done to them and to the processes in them."""

    cluster: Cluster

    def run(self, node: str, *command: str, timeout: float = 30) -> str:
        return self.cluster.docker("exec", node, *command, timeout=timeout)

    def processes(self, node: str, uid: str) -> list[Process]:
        """Of the pod with this UID, oldest first as far as pids tell."""
        pattern = f"pod({uid}|{uid.replace('-', '_')})"
        found = []
        for line in self.run(node, "sh", "-c", _LIST % pattern).splitlines():
            pid, name, command = line.split("\t", 2)
            found.append(Process(node, int(pid), name, command))
        return sorted(found, key=lambda p: p.pid)

    def signal(self, signal: str, *processes: Process) -> None:
        """Tolerates processes that are gone, as they may end by themselves."""
        for node in {p.node for p in processes}:
            pids = " ".join(str(p.pid) for p in processes if p.node == node)
            self.run(node, "sh", "-c", f"kill -{signal} {pids} 2>/dev/null || true")

    def thaw_all(self, node: str, uid: str) -> None:
        self.signal("CONT", *self.processes(node, uid))

    def drop(self, node: str, *rules: str) -> None:
        """Drop what any of these rules match, whatever is connected already."""
        script = [
            f"iptables -w -N {CHAIN} 2>/dev/null",
            *(
                f"iptables -w -C {where} -j {CHAIN} 2>/dev/null || iptables -w -I {where} 1 -j {CHAIN}"
                for where in ("INPUT", "OUTPUT", "FORWARD")
            ),
            *(f"iptables -w -A {CHAIN} {rule} -j DROP || exit 1" for rule in rules),
        ]
        self.run(node, "sh", "-c", "\n".join(script))

    def heal(self, node: str) -> None:
        self.run(node, "sh", "-c", f"iptables -w -F {CHAIN} 2>/dev/null || true")


# ---- what the object said ----------------------------------------------------------------------------------


@dataclass
class Seen:
    at: float
    """Wall clock."""
    object: dict[str, Any]

    @property
    def status(self) -> dict[str, Any]:
        return self.object.get("status") or {}


class Watch:
    """Every state of some objects since the start, by a watch that is begun again when it ends."""

    def __init__(self, cluster: Cluster, namespace: str, *what: str) -> None:
        self._command = [
            "kubectl", "--context", cluster.context, "-n", namespace, "get", *what, "-o", "json", "--watch",
        ]  # fmt: skip
        self._env = {**os.environ, **cluster.env()}
        self.seen: list[Seen] = []
        self._stop = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.is_set():
            with subprocess.Popen(
                self._command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as self._process:
                assert self._process.stdout is not None
                text = ""
                for line in self._process.stdout:
                    text += line
                    if line.startswith("}"):
                        self.seen.append(Seen(time.time(), json.loads(text)))
                        text = ""
            self._stop.wait(0.3)

    def since(self, at: float) -> list[Seen]:
        return [s for s in self.seen if s.at >= at]


class History(Watch):
    """Of the one object under test."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        super().__init__(cluster, namespace, "wsync", "demo")

    @property
    def status(self) -> dict[str, Any]:
        return self.seen[-1].status if self.seen else {}

    def decided(self) -> set[str]:
        return {d["version"] for s in self.seen if (d := s.status.get("decision"))}

    def finished(self) -> list[tuple[float, str]]:
        """When each version was first seen live on all its members."""
        found: dict[str, float] = {}
        for s in self.seen:
            decision = s.status.get("decision") or {}
            if decision.get("finished"):
                found.setdefault(decision["version"], s.at)
        return sorted((at, version) for version, at in found.items())


def named(seen: list[Seen], before: dict[str, Any]) -> set[str]:
    """The pods that the object blames since `before`: culprits of rounds, and who stands in the words of what is
    wrong. `before` is the status at the beginning."""
    old = {(r["number"], r.get("attempts")) for r in before.get("rounds", ())}
    texts: list[str] = []
    for s in seen:
        for r in s.status.get("rounds", ()):
            if (r["number"], r.get("attempts")) not in old:
                texts += [r.get("culprit", ""), r.get("message", "")]
        texts += [c["message"] for c in s.status.get("conditions", ()) if _blames(c)]
    return {word.strip(".,;:()'\"") for text in texts for word in text.split()}


def _blames(condition: dict[str, Any]) -> bool:
    """Whether its message is about who is at fault, and not about who is not yet in sync."""
    match condition["type"]:
        case "MembersResolved" | "RendezvousEstablished":
            return bool(condition["status"] == "False")
        case "Stalled":
            return bool(condition["status"] == "True")
        case "Ready":
            return condition["reason"] in ("EpochFailed", "RoundFailed")
    return False


# ---- all of it together ------------------------------------------------------------------------------------


@dataclass
class Pod:
    name: str
    uid: str
    node: str
    ip: str
    ready: bool
    restarts: int


def pod_of(raw: dict[str, Any]) -> Pod:
    status = raw["status"]
    conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
    return Pod(
        raw["metadata"]["name"],
        raw["metadata"]["uid"],
        raw["spec"].get("nodeName", ""),
        status.get("podIP", ""),
        conditions.get("Ready") == "True",
        sum(c["restartCount"] for c in status.get("containerStatuses", ())),
    )


@dataclass
class World:
    """One fleet for many cells. All times are seconds of the wall clock."""

    fleet: FaultFleet
    nodes: Nodes
    history: History
    book: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0

    @classmethod
    def begin(cls, cluster: Cluster) -> World:
        workers = [
            node["metadata"]["name"]
            for node in json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
            if "node-role.kubernetes.io/control-plane" not in node["metadata"]["labels"]
        ]
        fleet = FaultFleet(cluster, NAMESPACE, SERVERS, home=min(workers))
        nodes = Nodes(cluster)
        if not cls._kept(cluster):
            install_operator(cluster, f"nodeSelector.kubernetes\\.io/hostname={fleet.home}")
            fleet.start()
        for node in [*workers, control_plane(cluster)]:
            nodes.heal(node)
        fleet.wait_servers_ready()
        world = cls(fleet, nodes, History(cluster, NAMESPACE))
        world.aim()
        # A fleet that was kept from an earlier session has had versions before.
        wait_until("the object's state", lambda: (world.history.seen or None, ""), 30)
        rounds = [world.history.status.get("decision"), *world.history.status.get("rounds", ())]
        world.count = max((int(r["version"].rsplit("-", 1)[1]) for r in rounds if r), default=0)
        return world

    @staticmethod
    def _kept(cluster: Cluster) -> bool:
        """Whether an earlier session left its fleet for this one."""
        found = cluster.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found", "-o", "name")
        return KEEP and bool(found.strip())

    # -- looking -----------------------------------------------------------------------------------------

    def servers(self) -> list[Pod]:
        return [pod_of(raw) for raw in self.fleet.pods("vllm")]

    def server(self, which: str) -> Pod:
        """`victim` is on a node of its own, `other` on the node of all else."""
        found = [s for s in self.servers() if (s.node == self.fleet.home) == (which == "other")]
        if len(found) != 1:
            raise FleetError(f"{len(found)} servers count as {which!r}")
        return found[0]

    def trainer(self, name: str) -> Pod:
        return next(p for raw in self.fleet.pods("trainer") if (p := pod_of(raw)).name == name)

    def operator(self) -> Pod:
        raw = self.fleet.cluster.kubectl(
            "-n",
            OPERATOR_NAMESPACE,
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/name=weightsync-operator",
            "-o",
            "json",
        )
        items = [i for i in json.loads(raw)["items"] if "deletionTimestamp" not in i["metadata"]]
        return pod_of(items[0])

    def find(self, pod: Pod, part: str) -> Process:
        """The process of a pod that does this part."""
        for process in self.nodes.processes(pod.node, pod.uid):
            if _IS[part](process):
                return process
        raise FleetError(f"pod {pod.name} has no process for {part!r}")

    def row(self, pod: str) -> dict[str, Any]:
        """The object's word on one member."""
        return next((m for m in self.history.status.get("members", ()) if m["pod"] == pod), {})

    def wait_spares(self, seconds: float = 90) -> None:
        """Wait until every pod has a mover and a spare that has started: what an earlier fault has used up is back."""

        def check() -> tuple[bool | None, object]:
            lacking = []
            for pod in [*self.servers(), *map(pod_of, self.fleet.pods("trainer"))]:
                names = [p.name for p in self.nodes.processes(pod.node, pod.uid)]
                lacking += [pod.name] * ("ws-mover-0" not in names or "ws-spare" not in names)
            return (True if not lacking else None), lacking

        wait_until("a spare mover in every pod", check, seconds, every=0.5)

    def aim(self) -> None:
        """Tell the witness where the servers are."""
        addresses = " ".join(s.ip for s in self.servers() if s.ip)
        self.fleet.kubectl(
            "exec", "witness", "--", "sh", "-c", f"echo {addresses} > /tmp/t && mv /tmp/t /tmp/targets"
        )

    # -- publishing --------------------------------------------------------------------------------------

    def go(self) -> str:
        """Ask the loop for the next version, and wait until it is published."""
        self.count += 1
        version, asked = f"step-{self.count}", time.time()
        self._ask_loop(version)

        def published() -> tuple[bool | None, object]:
            for line in self.trainer_lines(asked - 1):
                if line.get("skipped") == version:
                    self._ask_loop(version)
                if line.get("greedy") == version:
                    self.book[version] = line["tokens"]
            return (True if version in self.book else None), "not published"

        wait_until(f"the publication of {version}", published, 60, every=0.1)
        return version

    def _ask_loop(self, version: str) -> None:
        script = f"echo {version} > /tmp/g && mv /tmp/g /tmp/go"
        self.fleet.kubectl("exec", "trainer-0", "--", "sh", "-c", script)

    def trainer_lines(self, since: float) -> list[dict[str, Any]]:
        return self._lines("trainer-0", since)

    def _lines(self, pod: str, since: float) -> list[dict[str, Any]]:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
        text = self.fleet.kubectl("logs", pod, f"--since-time={stamp}")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    # -- judging -----------------------------------------------------------------------------------------

    def heard(self, since: float) -> list[Heard]:
        """What servers answered to questions since then."""
        return [
            Heard(
                x["asked"], x["answered"], x["service"], x["pod"], x["version"] or LOADED, tuple(x["tokens"])
            )
            for x in self._lines("witness", since)
            if "error" not in x and x["asked"] >= since
        ]

    def longest_step(self, since: float) -> Longest | None:
        """None when the loop printed nothing."""
        lines = [x for x in self.trainer_lines(since) if "loop" in x and x["loop"] >= since]
        if not lines:
            return None
        return Longest(max(x["longest_ms"] for x in lines), max(x["stall_ms"] for x in lines))

    def serving(self, version: str, *names: str) -> bool:
        """Whether the object and Kubernetes say that these pods serve exactly this version."""
        rows = [self.row(name) for name in names]
        if not all(row.get("version") == version and row.get("state") == "InSync" for row in rows):
            return False
        ready = {s.name for s in self.servers() if s.ready}
        return set(names) <= ready

    def wait_all_serve(self, version: Callable[[], str], seconds: float) -> None:
        def check() -> tuple[bool | None, object]:
            names = [s.name for s in self.servers()]
            ok = len(names) == SERVERS and self.serving(version(), *names)
            return ok or None, {n: self.row(n) for n in names} | {"want": version()}

        wait_until("every server in sync", check, seconds, every=0.2)

    def wait_heard(self, version: str, seconds: float = 20) -> None:
        """Wait until the witness has heard this version from every server directly."""
        began = time.time()
        self.aim()

        def check() -> tuple[bool | None, object]:
            last = {h.pod: h.version for h in self.heard(began) if not h.service}
            return (list(last.values()) == [version] * SERVERS) or None, last

        wait_until(f"every server answering with {version}", check, seconds, every=0.3)


_IS: dict[str, Callable[[Process], bool]] = {
    "trainer-rank": lambda p: "tests/e2e/loop.py" in p.command,
    "trainer-mover": lambda p: p.name == "ws-mover-0",
    "vllm-mover": lambda p: p.name == "ws-mover-0",
    "agent": lambda p: "weightsync_engine.agent" in p.command,
    "vllm-server": lambda p: "vllm.entrypoints.openai.api_server" in p.command,
    "vllm-worker": lambda p: p.command.startswith("VLLM::Worker"),
    "operator": lambda p: "weightsync_operator" in p.command,
}


def control_plane(cluster: Cluster) -> str:
    return cluster.kubectl(
        "get",
        "nodes",
        "-l",
        "node-role.kubernetes.io/control-plane",
        "-o",
        "jsonpath={.items[0].metadata.name}",
    )


@contextlib.contextmanager
def fresh_or_kept(cluster: Cluster, logs: Path) -> Iterator[World]:
    """A world; its logs are kept at the end."""
    world = World.begin(cluster)
    try:
        yield world
    finally:
        world.history.close()
        world.fleet.keep_logs(logs)
        if not KEEP:
            world.fleet.stop()
