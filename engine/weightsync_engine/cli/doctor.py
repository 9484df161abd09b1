"""What `weightsync doctor NAME` collects of a cluster by kubectl: all that a person would paste into a bug report.

Every command has a deadline, and one that fails becomes a line of the report. Values of secrets are not asked for:
of environments only the names are shown, and the values of settings of weightsync, vLLM, NCCL and gloo.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..protocol.names import (
    CONTAINER_PORT_NAME,
    DEFAULT_INFERENCE_PORT,
    DEFAULT_TRAINER_PORT,
    GATE_IN_SYNC,
    GROUP,
    LABEL_ROLE,
    LABEL_SYNC,
    ROLE_INFERENCE,
    ROLE_TRAINER,
    ROUTE_READY,
)
from . import redact
from .bugreport import Ran, Section, run
from .inside import SETTINGS

PARALLEL = 8
OPERATOR_LABEL = "app.kubernetes.io/name=weightsync-operator"
LEASE = "weightsync-operator"
EVENTS = 60

Json = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Which object, and by which kubectl."""

    name: str
    namespace: str
    kubectl: str = "kubectl"
    flags: tuple[str, ...] = ()
    """Such as --context."""
    operator_namespace: str = "weightsync-system"
    seconds: float = 20.0
    """Deadline of each command."""
    tail: int = 200
    """Lines of each log."""
    pods: int = 16
    """Of so many pods the logs and the inside are read; those that are not in order come first."""
    look_inside: bool = True

    def call(self, *arguments: str) -> Ran:
        wait = f"--request-timeout={max(1, int(self.seconds - 1))}s"
        return run([self.kubectl, *self.flags, wait, *arguments], self.seconds)

    def json(self, *arguments: str) -> tuple[Json, str]:
        """What the API server answered, and what went wrong; `kubectl version` may give both."""
        ran = self.call(*arguments, "-o", "json")
        try:
            found = json.loads(ran.text)
        except ValueError:
            return {}, ran.problem or f"`kubectl {' '.join(arguments)}` gave no JSON"
        return (found, ran.problem) if isinstance(found, dict) else ({}, ran.problem or "no JSON object")


def collect(target: Target) -> list[Section]:
    """All sections, in the order of reading. Never raises for what a cluster or kubectl does."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        pods_of = pool.submit(
            target.json, "get", "pods", "-n", target.namespace, "-l", f"{LABEL_SYNC}={target.name}"
        )
        first: list[Callable[[], Section]] = [
            lambda: _versions(target),
            lambda: _object(target),
            lambda: _yaml(target),
        ]
        operator: list[Callable[[], Section]] = [
            lambda: _operator(target),
            lambda: _lease(target),
        ]
        head = [pool.submit(part) for part in first]
        tail = [pool.submit(part) for part in operator]
        answer, problem = pods_of.result()
        pods = list(answer.get("items", []))
        summary = _pods(pods, problem)
        events = pool.submit(_events, target, [p["metadata"]["name"] for p in pods])
        chosen = sorted(pods, key=lambda pod: (_in_order(pod), pod["metadata"]["name"]))[: target.pods]
        if len(chosen) < len(pods):
            summary.add(f"(logs of {len(chosen)} of {len(pods)} pods: --pods gives more)")
        each = [pool.submit(_pod, target, pod) for pod in chosen]
        return [
            *(part.result() for part in head),
            summary,
            events.result(),
            *(section for part in each for section in part.result()),
            *(part.result() for part in tail),
        ]


def _versions(target: Target) -> Section:
    section = Section("cluster")
    answer, problem = target.json("version")
    if problem:
        section.find(problem)
    for side in ("clientVersion", "serverVersion"):
        found = answer.get(side) or {}
        section.add(f"{side}: {found.get('gitVersion', 'unknown')} {found.get('platform', '')}")
    answer, problem = target.json("get", "crd", f"weightsyncs.{GROUP}")
    if problem:
        section.find(problem)
    else:
        served = [v["name"] for v in answer.get("spec", {}).get("versions", []) if v.get("served")]
        section.add(f"CRD weightsyncs.{GROUP}: serves {', '.join(served) or 'nothing'}")
    return section


def _object(target: Target) -> Section:
    section = Section(f"WeightSync {target.namespace}/{target.name}")
    found, problem = target.json("get", f"weightsyncs.{GROUP}", target.name, "-n", target.namespace)
    if problem:
        section.find(problem)
        return section
    status = found.get("status") or {}
    if not status:
        section.find("the operator has never looked at this object: does it run, and watch this namespace?")
    generation = found.get("metadata", {}).get("generation")
    if status and status.get("observedGeneration") != generation:
        section.find(
            f"the operator has seen generation {status.get('observedGeneration')}, it is {generation}"
        )
    section.add(
        f"version {status.get('version', 'none')}, trainers {status.get('trainers', '?')}, "
        f"inference {status.get('inference', '?')}, term {status.get('term', '?')}, "
        f"epoch {(status.get('epoch') or {}).get('number', '?')}"
    )
    for condition in status.get("conditions", []):
        section.add(
            f"{condition['type']:24} {condition['status']:8} {condition['reason']:24} "
            f"since {condition['lastTransitionTime']}: {condition['message']}"
        )
        bad = "True" if condition["type"] == "Stalled" else "False"
        if condition["type"] in ("Ready", "Stalled") and condition["status"] == bad:
            section.find(f"{condition['type']} is {bad}: {condition['reason']}: {condition['message']}")
    for member in status.get("members", []):
        section.add("member " + ", ".join(f"{key} {value}" for key, value in member.items()))
    for entry in status.get("rounds", []):
        section.add("round " + ", ".join(f"{key} {value}" for key, value in entry.items()))
    return section


def _yaml(target: Target) -> Section:
    section = Section("the object in full")
    ran = target.call("get", f"weightsyncs.{GROUP}", target.name, "-n", target.namespace, "-o", "yaml")
    section.add(ran.text)
    if ran.problem:
        section.find(ran.problem)
    return section


def _events(target: Target, pods: Sequence[str]) -> Section:
    section = Section("events of the object and its pods")
    answer, problem = target.json("get", "events", "-n", target.namespace)
    if problem:
        section.find(problem)
    names = {target.name, *pods}
    items = [e for e in answer.get("items", []) if (e.get("involvedObject") or {}).get("name") in names]

    def when(event: Json) -> str:
        series = event.get("series") or {}
        return str(
            series.get("lastObservedTime")
            or event.get("lastTimestamp")
            or event.get("eventTime")
            or event.get("metadata", {}).get("creationTimestamp", "")
        )

    for event in sorted(items, key=when)[-EVENTS:]:
        count = (event.get("series") or {}).get("count") or event.get("count") or 1
        about = event["involvedObject"]
        section.add(
            f"{when(event)} {event.get('type')} {event.get('reason')} x{count} "
            f"{about.get('kind')}/{about.get('name')}: {event.get('message', '').strip()}"
        )
    if len(items) > EVENTS:
        section.add(f"(the last {EVENTS} of {len(items)})")
    return section


# ---- pods --------------------------------------------------------------------------------------------------


def _conditions(pod: Json) -> dict[str, Json]:
    return {c["type"]: c for c in pod.get("status", {}).get("conditions") or ()}


def _in_order(pod: Json) -> bool:
    ready = _conditions(pod).get("Ready", {}).get("status") == "True"
    return ready and not _restarts(pod)


def _statuses(pod: Json) -> list[Json]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _restarts(pod: Json) -> int:
    return sum(int(c.get("restartCount", 0)) for c in _statuses(pod))


def _pods(pods: Sequence[Json], problem: str) -> Section:
    section = Section("member pods")
    if problem:
        section.find(problem)
        return section
    for role in (ROLE_TRAINER, ROLE_INFERENCE):
        if not any(p["metadata"].get("labels", {}).get(LABEL_ROLE) == role for p in pods):
            section.find(f"no pod has the labels {LABEL_SYNC} of this object and {LABEL_ROLE}={role}")
    for pod in pods:
        metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
        name, role = metadata["name"], metadata.get("labels", {}).get(LABEL_ROLE, "no role")
        leaving = (
            f", leaving since {metadata['deletionTimestamp']}" if "deletionTimestamp" in metadata else ""
        )
        section.add(
            f"{name}: {role}, {status.get('phase')}{leaving}, uid {metadata.get('uid')}, IP {status.get('podIP')}, "
            f"node {spec.get('nodeName')}, created {metadata.get('creationTimestamp')}"
        )
        for condition in _conditions(pod).values():
            words = f"{condition.get('reason', '')} {condition.get('message', '')}".strip()
            section.add(f"  {condition['type']} {condition['status']}" + (f": {words}" if words else ""))
        for container in _statuses(pod):
            section.add(
                f"  container {container['name']}: {_state(container)}, image {container.get('imageID')}"
            )
            last = (container.get("lastState") or {}).get("terminated")
            if container.get("restartCount"):
                ended = f", the last time by {_ended(last)}" if last else ""
                section.find(
                    f"container {container['name']} of {name} has restarted {container['restartCount']} times{ended}"
                )
        for container in spec.get("containers") or ():
            section.add(*_container(container))
        for lack in _lacks(pod, role):
            section.find(f"{name} {lack}")
    return section


def _state(container: Json) -> str:
    state = container.get("state") or {}
    (kind, found), *_ = state.items() or [("unknown", {})]
    reason = f" ({found['reason']})" if found.get("reason") else ""
    return f"{kind}{reason}, ready {container.get('ready')}, {container.get('restartCount', 0)} restarts"


def _ended(last: Json) -> str:
    return f"exit {last.get('exitCode')} ({last.get('reason', 'no reason')}) at {last.get('finishedAt')}"


def _container(container: Json) -> list[str]:
    words = redact.arguments([*(container.get("command") or ()), *(container.get("args") or ())])
    lines = [f"  runs {container.get('image')}: {' '.join(words)}"]
    shown, names = [], []
    for variable in container.get("env") or ():
        name = variable["name"]
        if name.startswith(SETTINGS) and "value" in variable:
            shown.append(f"{name}={redact.value(name, variable['value'])}")
        else:
            names.append(name)
    lines += [f"  {line}" for line in shown]
    if names:
        lines.append(f"  also set: {', '.join(names)}")
    ports = [f"{p.get('name', '')}:{p['containerPort']}" for p in container.get("ports") or ()]
    requests = container.get("resources") or {}
    lines.append(f"  ports {', '.join(ports) or 'none'}; resources {json.dumps(requests)}")
    return lines


def _lacks(pod: Json, role: str) -> list[str]:
    """What a pod needs to take part and has not."""
    lacks: list[str] = []
    spec, status = pod.get("spec", {}), pod.get("status", {})
    containers = spec.get("containers") or []
    if role not in (ROLE_TRAINER, ROLE_INFERENCE):
        lacks.append(f"has no label {LABEL_ROLE}: write {ROLE_TRAINER} or {ROLE_INFERENCE}")
    if status.get("phase") != "Running":
        lacks.append(f"is {status.get('phase')}")
    if role != ROLE_INFERENCE:
        return lacks
    if not any(g.get("conditionType") == GATE_IN_SYNC for g in spec.get("readinessGates") or ()):
        lacks.append(f"has no readiness gate {GATE_IN_SYNC}: it gets requests while it is not in sync")
    paths = [((c.get("readinessProbe") or {}).get("httpGet") or {}).get("path") for c in containers]
    if ROUTE_READY not in paths:
        lacks.append(f"has no readiness probe on {ROUTE_READY}")
    words = " ".join(w for c in containers for w in [*(c.get("command") or ()), *(c.get("args") or ())])
    if "weight-transfer-config" not in words:
        lacks.append('starts vLLM without --weight-transfer-config \'{"backend": "weightsync"}\'')
    plugins = [v for c in containers for v in c.get("env") or () if v["name"] == "VLLM_PLUGINS"]
    if not any("weightsync" in v.get("value", "weightsync") for v in plugins):
        lacks.append("does not set VLLM_PLUGINS=weightsync, without which vLLM loads no agent")
    gate = _conditions(pod).get(GATE_IN_SYNC)
    if gate is not None and gate["status"] != "True":
        lacks.append(f"is out of sync: {gate.get('reason')}: {gate.get('message')}")
    return lacks


def _port(pod: Json) -> int:
    containers = [*(pod["spec"].get("containers") or ()), *(pod["spec"].get("initContainers") or ())]
    for container in containers:
        for port in container.get("ports") or ():
            if port.get("name") == CONTAINER_PORT_NAME:
                return int(port["containerPort"])
    trainer = pod["metadata"].get("labels", {}).get(LABEL_ROLE) == ROLE_TRAINER
    return DEFAULT_TRAINER_PORT if trainer else DEFAULT_INFERENCE_PORT


def _pod(target: Target, pod: Mapping[str, Any]) -> list[Section]:
    """One pod from near: what its agent says, what it logs, what is inside."""
    name, namespace = pod["metadata"]["name"], target.namespace
    agent = Section(f"agent of {name}")
    port = _port(dict(pod))
    ran = target.call("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy{ROUTE_READY}")
    agent.add(f"{ROUTE_READY} on port {port}: {ran.text.strip() or ran.problem}")
    if ran.problem:
        agent.find(f"{ROUTE_READY} on port {port}: {ran.problem}")
    sections = [agent]
    log = Section(f"log of {name}")
    logs = ["logs", name, "-n", namespace, "--all-containers", "--prefix", f"--tail={target.tail}"]
    ran = target.call(*logs)
    log.add(ran.text)
    if ran.problem:
        log.find(ran.problem)
    sections.append(log)
    if _restarts(dict(pod)):
        before = Section(f"log of {name} before its restart")
        for container in _statuses(dict(pod)):
            if container.get("restartCount"):
                ran = target.call(
                    "logs",
                    name,
                    "-n",
                    namespace,
                    "-c",
                    container["name"],
                    "--previous",
                    f"--tail={target.tail}",
                )
                before.add(f"container {container['name']}:", ran.text)
                if ran.problem:
                    before.find(ran.problem)
        sections.append(before)
    if target.look_inside and pod.get("status", {}).get("phase") == "Running":
        within = Section(f"inside {name}")
        command = [
            "weightsync",
            "doctor",
            "--port",
            str(port),
            "--timeout",
            str(max(1, int(target.seconds / 4))),
        ]
        ran = target.call("exec", name, "-n", namespace, "--", *command)
        # Its exit status says that it found something, not that it failed.
        within.add(*(line.replace("## ", "### ") for line in ran.text.splitlines()))
        if not ran.text:
            within.find(ran.problem or "no words")
        sections.append(within)
    return sections


# ---- the operator ------------------------------------------------------------------------------------------


def _operator(target: Target) -> Section:
    section = Section("operator")
    namespace = target.operator_namespace
    answer, problem = target.json("get", "pods", "-n", namespace, "-l", OPERATOR_LABEL)
    if problem:
        section.find(problem)
        return section
    pods = list(answer.get("items", []))
    if not pods:
        section.find(f"no operator runs in namespace {namespace} (--operator-namespace tells where it is)")
    for pod in pods:
        name = pod["metadata"]["name"]
        section.add(f"{name}: {pod.get('status', {}).get('phase')}, {_restarts(pod)} restarts")
        for container in _statuses(pod):
            section.add(
                f"  container {container['name']}: {_state(container)}, image {container.get('imageID')}"
            )
        if not _in_order(pod):
            section.find(f"{name} is not Ready, or has restarted")
        ran = target.call("logs", name, "-n", namespace, f"--tail={target.tail}")
        section.add(ran.text)
        if ran.problem:
            section.find(ran.problem)
        if _restarts(pod):
            ran = target.call("logs", name, "-n", namespace, "--previous", f"--tail={target.tail}")
            section.add("before its restart:", ran.text)
            if ran.problem:
                section.find(ran.problem)
    return section


def _lease(target: Target) -> Section:
    section = Section("lease of the operator")
    answer, problem = target.json("get", "lease", LEASE, "-n", target.operator_namespace)
    if problem:
        section.find(problem)
        return section
    spec = answer.get("spec", {})
    section.add(", ".join(f"{key} {value}" for key, value in spec.items()))
    if not spec.get("holderIdentity"):
        section.find("nobody holds it: no operator works")
    try:
        renewed = datetime.datetime.fromisoformat(str(spec.get("renewTime")))
        age = (datetime.datetime.now(datetime.UTC) - renewed).total_seconds()
        if age > 2 * float(spec.get("leaseDurationSeconds", 15)):
            section.find(f"it was renewed {age:.0f} s ago: no operator works, or clocks differ")
    except ValueError:
        section.add("it was never renewed")
    return section
