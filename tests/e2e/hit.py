"""How a phase is held still, and how a part is hit in it.

A phase is a place, not luck: somebody else whom it needs is frozen, so that it can neither end nor fail before its
deadline, and thaws as soon as the part is hit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from examples.demo.fleet import OPERATOR_NAMESPACE, wait_until
from tests.cluster import ClusterError

from .matrix import LEAD, SECOND, Fault, Phase, Target
from .world import Pod, Process, World, control_plane

Undo = Callable[[], None]
REACHED_SECONDS = 15.0


@dataclass
class Held:
    """A round that stands in one phase until `release`."""

    world: World
    version: str = ""
    frozen: list[Process] = field(default_factory=list)

    def freeze(self, *processes: Process) -> None:
        self.frozen += processes
        self.world.nodes.signal("STOP", *processes)

    def thaw(self, *processes: Process) -> None:
        self.world.nodes.signal("CONT", *processes)
        self.frozen = [p for p in self.frozen if p not in processes]

    def release(self, but: Process | None = None) -> None:
        """Let the round go on; `but` is the part that was hit by being frozen itself. May be called again: what
        runs on a node that does not answer stays frozen."""
        for node in {p.node for p in self.frozen}:
            here = [p for p in self.frozen if p.node == node and p != but]
            try:
                self.thaw(*here)
            except ClusterError:
                continue


def hold(world: World, phase: Phase, victim: Pod, other: Pod) -> Held:
    """Publish the next version and stop its round in this phase."""
    held = Held(world)
    mover = world.find(other, "vllm-mover")
    pods = (LEAD, SECOND, victim.name)
    match phase:
        case "join":
            # Another transport by name, the same one in fact: reason enough for a new epoch.
            spec = world.history.seen[-1].object["spec"]
            transport = "Gloo" if spec.get("transport", "Auto") == "Auto" else "Auto"
            before = world.history.status["epoch"]["number"]
            held.freeze(mover)
            patch = f'{{"spec": {{"transport": "{transport}"}}}}'
            world.fleet.kubectl("patch", "wsync", "demo", "--type=merge", "-p", patch)
            held.version = world.go()
            _reach(world, pods, "Joining", lambda status: status["epoch"]["number"] > before)
        case "prepare":
            held.freeze(world.find(other, "vllm-server"))
            held.version = world.go()
            _reach(world, pods, "Ready")
        case "transfer":
            held.freeze(mover)
            held.version = world.go()
            _reach(world, pods, "Transferring")
        case "verify":
            held.freeze(mover)
            held.version = world.go()
            _reach(world, (*pods, other.name), "Transferring")
            held.freeze(world.find(other, "vllm-server"))
            held.thaw(mover)
            _reach(world, pods, "Verified")
        case "commit":
            held.freeze(world.find(other, "vllm-worker"), world.find(victim, "vllm-worker"))
            held.version = world.go()
            version = held.version
            _reach(world, (victim.name, other.name), "Committing", lambda status: _decided(status, version))
    return held


def _decided(status: dict[str, Any], version: str) -> bool:
    decision = status.get("decision") or {}
    return decision.get("version") == version and not decision.get("finished")


def _reach(
    world: World,
    pods: tuple[str, ...],
    state: str,
    also: Callable[[dict[str, Any]], bool] = lambda status: True,
) -> None:
    def check() -> tuple[bool | None, object]:
        states = {pod: world.row(pod).get("state") for pod in pods}
        reached = set(states.values()) == {state} and also(world.history.status)
        return reached or None, states

    wait_until(f"the round standing at {state}", check, REACHED_SECONDS, every=0.05)


# ---- the faults --------------------------------------------------------------------------------------------


@dataclass
class Hit:
    """A part that is about to be hit: all that takes time to look up is looked up before."""

    world: World
    fault: Fault
    target: Target
    victim: Pod
    other: Pod
    process: Process | None = None
    pod: Pod | None = None

    def __post_init__(self) -> None:
        world = self.world
        match self.target:
            case "operator":
                self.pod = world.operator()
            case "trainer-rank" | "trainer-mover":
                self.pod = world.trainer(SECOND)
            case "agent":
                self.pod = world.trainer(LEAD)
            case "vllm-server" | "vllm-worker" | "vllm-mover":
                self.pod = self.victim
        if self.pod is not None:
            self.process = world.find(self.pod, self.target)
        if self.target == "api-server":
            node = control_plane(world.fleet.cluster)
            pid = world.nodes.run(node, "pgrep", "-xo", "kube-apiserver").strip()
            self.process = Process(node, int(pid), "kube-apiserver", "")

    @property
    def kept(self) -> Process | None:
        """What must stay frozen when the held round goes on."""
        return self.process if self.fault in ("stop", "stop+cont") else None

    def strike(self) -> Undo:
        """Hit it. The result ends what lasts, and may be called again."""
        world, nodes, docker = self.world, self.world.nodes, self.world.fleet.cluster.docker
        match self.fault, self.target:
            case "kill", "node":
                docker("kill", self.victim.node)
                return lambda: _start_node(world, self.victim.node)
            case (("stop" | "stop+cont"), "node"):
                docker("pause", self.victim.node)
                return lambda: _unpause(world, self.victim.node)
            case "restart", "node":
                docker("restart", "-t", "1", self.victim.node)
            case "kill", _:
                nodes.signal("KILL", self._process())
            case (("stop" | "stop+cont"), _):
                nodes.signal("STOP", self._process())
                return lambda: nodes.signal("CONT", self._process())
            case "cut", _:
                node, rules = self._cut()
                nodes.drop(node, *rules)
                return lambda: nodes.heal(node)
            case "restart", "operator":
                world.fleet.cluster.kubectl(
                    "-n", OPERATOR_NAMESPACE, "delete", "pod", self._pod().name, "--wait=false"
                )
            case "restart", "agent":
                nodes.signal("TERM", self._process())
            case "restart", "api-server":
                node = self._process().node
                container = nodes.run(node, "crictl", "ps", "-q", "--name", "kube-apiserver").split()[0]
                nodes.run(node, "crictl", "stop", "-t", "5", container)
            case "restart", _:
                world.fleet.kubectl("delete", "pod", self._pod().name, "--wait=false")
            case _:
                raise AssertionError(f"{self.fault} x {self.target} is no cell")
        return lambda: None

    def _process(self) -> Process:
        assert self.process is not None
        return self.process

    def _pod(self) -> Pod:
        assert self.pod is not None
        return self.pod

    def _cut(self) -> tuple[str, list[str]]:
        """The node, and what is dropped there."""
        if self.target == "node":
            return self.victim.node, ["-i eth0", "-o eth0"]
        if self.target == "api-server":
            return self._process().node, ["-i eth0 -p tcp --dport 6443"]
        pod = self._pod()
        match self.target:
            case "agent":
                rules = [f"-d {pod.ip} -p tcp --dport 7077", f"-s {pod.ip} -p tcp --sport 7077"]
            case "trainer-mover":
                rules = []
                for server in (self.victim, self.other):
                    rules += [f"-s {pod.ip} -d {server.ip}", f"-d {pod.ip} -s {server.ip}"]
            case "vllm-mover":
                rules = [f"-d {pod.ip} -p tcp ! --dport 8000", f"-s {pod.ip} -p tcp ! --sport 8000"]
            case _:
                rules = [f"-d {pod.ip}", f"-s {pod.ip}"]
        return pod.node, rules


def _unpause(world: World, node: str) -> None:
    cluster = world.fleet.cluster
    if cluster.docker("inspect", "-f", "{{.State.Paused}}", node).strip() == "true":
        cluster.docker("unpause", node)


def _start_node(world: World, node: str) -> None:
    world.fleet.cluster.docker("start", node)


def heal(world: World, victim_node: str, seconds: float) -> None:
    """Undo whatever may be left of any fault, and wait until the fleet is in sync with what is published next."""
    cluster, nodes = world.fleet.cluster, world.nodes
    if cluster.docker("inspect", "-f", "{{.State.Running}}", victim_node).strip() != "true":
        _start_node(world, victim_node)
    _unpause(world, victim_node)
    for node in (victim_node, world.fleet.home, control_plane(cluster)):
        nodes.heal(node)
    for raw in [*world.fleet.pods("vllm"), *world.fleet.pods("trainer")]:
        pod = raw["spec"].get("nodeName")
        if pod:
            nodes.thaw_all(pod, raw["metadata"]["uid"])
    deadline = time.monotonic() + seconds
    version = world.go()
    world.wait_all_serve(lambda: version, max(deadline - time.monotonic(), 1.0))
