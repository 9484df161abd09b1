"""A real fleet in a real cluster: rounds, and what must hold when its parts die, freeze or come back.

One fleet is started for the module; every test publishes the training loop's next version and leaves the fleet in
sync. Parts are frozen (SIGSTOP) before a version is published, so that "in the middle of a round" is a place, not luck.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from examples.demo.fleet import (
    OPERATOR_NAMESPACE,
    ROOT,
    Answer,
    Fleet,
    FleetError,
    install_operator,
    wait_until,
)
from tests.cluster import Cluster

pytestmark = pytest.mark.timeout(600)
TRANSFER_SECONDS = 15
LOGS = ROOT / "build" / "e2e"


class Versions:
    """Hands out the training loop's versions in order, and remembers what was committed last."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.count = 0
        self.committed: Any = None

    def start_next(self) -> str:
        """Let the next version be published; returns at once."""
        self.count += 1
        self.fleet.say_go(f"step-{self.count}")
        return f"step-{self.count}"

    def finish(self, version: str) -> dict[str, Answer]:
        """Wait for its commit; both servers must answer as transformers does."""
        self.committed, answers = self.fleet.compare(version)
        return answers

    def commit_next(self) -> dict[str, Answer]:
        return self.finish(self.start_next())


@pytest.fixture(scope="module")
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    install_operator(cluster)
    fleet = Fleet(cluster, namespace="e2e", versions=20, transfer_seconds=TRANSFER_SECONDS)
    try:
        fleet.start()
        fleet.wait_servers_ready()
        yield fleet
    finally:
        fleet.keep_logs(LOGS)
        fleet.stop()


@pytest.fixture(scope="module")
def versions(fleet: Fleet) -> Versions:
    return Versions(fleet)


def signal_in(fleet: Fleet, pod: str, signal: str, process: str) -> None:
    """Send a signal to the processes of a pod whose short name is `process`."""
    fleet.kubectl("exec", pod, "--", "pkill", f"-{signal}", "-x", process)


def kill_server(fleet: Fleet, pod: str) -> None:
    """kill -9 of vLLM's engine, which takes the server with it; pid 1 itself cannot be killed from inside its pod."""
    fleet.kubectl("exec", pod, "--", "pkill", "-KILL", "-f", "VLLM::EngineCore")


def servers(fleet: Fleet) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in fleet.pods("vllm"))


def restarts(fleet: Fleet, name: str) -> int:
    pod = next(p for p in fleet.pods("vllm") if p["metadata"]["name"] == name)
    return int(pod["status"]["containerStatuses"][0]["restartCount"])


def wait_condition(fleet: Fleet, kind: str, status: str, seconds: float = 60) -> dict[str, str]:
    def check() -> tuple[dict[str, str] | None, object]:
        condition = fleet.condition(kind)
        return (condition if condition["status"] == status else None), condition

    return wait_until(f"condition {kind}={status}", check, seconds)


def keep(name: str, text: str) -> None:
    """For people: what a test saw, beside the logs."""
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / name).write_text(text)


def describe(fleet: Fleet) -> str:
    return fleet.kubectl("describe", "wsync", "demo")


def wait_described(fleet: Fleet, *needles: str, seconds: float = 60) -> str:
    """Wait until `kubectl describe` tells all of it."""

    def check() -> tuple[str | None, object]:
        text = describe(fleet)
        missing = [n for n in needles if n not in text]
        return (None if missing else text), f"missing {missing}"

    return wait_until(f"describe telling {needles}", check, seconds)


# ---- the way of a weight -----------------------------------------------------------------------------------


def test_three_versions_arrive_in_both_servers(fleet: Fleet, versions: Versions) -> None:
    tokens = [next(iter(versions.commit_next().values())).tokens for _ in range(3)]
    assert len({tuple(t) for t in tokens}) == 3, "three versions should not answer alike"
    for kind in ("Ready", "InSync"):
        fleet.kubectl("wait", "--for", f"condition={kind}", "wsync/demo", "--timeout=30s")
    row = fleet.kubectl("get", "wsync", "demo", "--no-headers")
    assert "step-3" in row and "2/2" in row.replace(" / ", "/"), row
    text = describe(fleet)
    assert all(name in text for name in [*servers(fleet), "trainer-0", "trainer-1"]), text


def test_an_idle_object_causes_no_api_writes(fleet: Fleet) -> None:
    before = json.loads(fleet.kubectl("get", "wsync,pods", "-o", "json"))["items"]
    command = ["kubectl", "-n", fleet.namespace, "get", "wsync", "demo", "-o", "name", "--watch-only"]
    watch = subprocess.run(
        [*command, "--request-timeout=15s"],
        env={**os.environ, **fleet.cluster.env()}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    after = json.loads(fleet.kubectl("get", "wsync,pods", "-o", "json"))["items"]

    def versions_of(items: list[dict[str, Any]]) -> dict[str, str]:
        return {i["metadata"]["uid"]: i["metadata"]["resourceVersion"] for i in items}

    assert watch.stdout == ""
    assert versions_of(before) == versions_of(after)


def test_an_agent_refuses_requests_without_the_operators_credential(fleet: Fleet) -> None:
    script = (
        "import sys, urllib.request, urllib.error\n"
        "for base in sys.argv[1:]:\n"
        "    for path, body in (('state', None), ('abort', b'{}'), ('admit', b'{}')):\n"
        "        request = urllib.request.Request(f'{base}/weightsync/v1/{path}', body)\n"
        "        try: print(urllib.request.urlopen(request, timeout=5).status)\n"
        "        except urllib.error.HTTPError as error: print(error.code)\n"
    )
    ips = [f"http://{p['status']['podIP']}:8000" for p in fleet.pods("vllm")]
    ips.append(f"http://{fleet.pods('trainer')[0]['status']['podIP']}:7077")
    out = fleet.kubectl("exec", "trainer-1", "--", sys.executable, "-c", script, *ips)
    assert out.split() == ["401"] * 9


# ---- faults ------------------------------------------------------------------------------------------------


def test_a_frozen_mover_is_named_and_the_round_is_repeated_without_it(
    fleet: Fleet, versions: Versions
) -> None:
    victim, other = servers(fleet)
    signal_in(fleet, victim, "STOP", "ws-mover-0")
    version = versions.start_next()
    keep("describe-during-a-round.txt", wait_described(fleet, "Transferring", version))
    assert fleet.ask(versions.committed)[other].version == versions.committed.version, (
        "the other server goes on"
    )
    text = wait_described(fleet, "Failed", victim, seconds=60)
    keep("describe-after-a-failed-round.txt", text)
    assert version in text
    versions.finish(version)
    assert restarts(fleet, victim) == 0


def test_a_killed_trainer_mover_does_not_stop_training(fleet: Fleet, versions: Versions) -> None:
    victim = servers(fleet)[0]
    signal_in(fleet, victim, "STOP", "ws-mover-0")
    version = versions.start_next()
    wait_described(fleet, "Transferring", version)
    signal_in(fleet, "trainer-1", "KILL", "ws-mover-0")
    wait_described(fleet, "trainer-1", "Failed")
    versions.finish(version)


def test_a_frozen_server_holds_up_nobody_else_and_catches_up_once_it_thaws(
    fleet: Fleet, versions: Versions
) -> None:
    victim, other = servers(fleet)
    fleet.kubectl("exec", victim, "--", "pkill", "-STOP", "-f", "VLLM::EngineCore")
    try:
        version = versions.start_next()

        def goes_on() -> tuple[bool | None, object]:
            answers = fleet.ask(versions.committed, seconds=15, servers=1)
            return (True if other in answers and answers[other].version == version else None), answers

        wait_until(f"{other} serving {version}", goes_on, 120)
    finally:
        fleet.kubectl("exec", victim, "--", "pkill", "-CONT", "-f", "VLLM::EngineCore")
    versions.finish(version)
    assert restarts(fleet, victim) == 0


def test_an_operator_killed_in_the_middle_of_a_round_starts_it_again(
    fleet: Fleet, versions: Versions
) -> None:
    signal_in(fleet, servers(fleet)[0], "STOP", "ws-mover-0")
    version = versions.start_next()
    wait_described(fleet, "Transferring", version)
    operator = ("-n", OPERATOR_NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/name=weightsync-operator")
    fleet.cluster.kubectl(*operator, "--grace-period=0", "--force")
    versions.finish(version)


def test_a_killed_server_comes_back_closed_and_catches_up(fleet: Fleet, versions: Versions) -> None:
    victim, other = servers(fleet)
    before = restarts(fleet, victim)
    kill_server(fleet, victim)
    assert fleet.ask(versions.committed, servers=1).keys() == {other}

    def back() -> tuple[bool | None, object]:
        # In this order: Ready may still be that of the killed server, as long as no restart is counted.
        again = restarts(fleet, victim) > before
        ready = fleet.ready_pods("vllm")
        return (True if again and victim in ready else None), ready

    wait_until(f"{victim} Ready again", back, 180)
    assert fleet.ask(versions.committed)[victim] == Answer(
        versions.committed.version, versions.committed.tokens
    )
    versions.commit_next()


def test_a_server_that_restarts_while_the_operator_is_down_never_answers_stale(
    fleet: Fleet, versions: Versions
) -> None:
    victim, other = servers(fleet)
    before = restarts(fleet, victim)
    operator = ("-n", OPERATOR_NAMESPACE, "scale", "deploy/weightsync-operator")
    fleet.cluster.kubectl(*operator, "--replicas=0")
    try:
        kill_server(fleet, victim)
        address = next(p["status"]["podIP"] for p in fleet.pods("vllm") if p["metadata"]["name"] == victim)
        body = json.dumps({"prompt": versions.committed.prompt, "max_tokens": 1, "temperature": 0})
        script = (
            "import sys, urllib.request, urllib.error\n"
            "kind = {'Content-Type': 'application/json'}\n"
            "request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), kind)\n"
            "try: print(urllib.request.urlopen(request, timeout=20).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError: print('silent')\n"
        )

        def closed() -> tuple[str | None, object]:
            code = fleet.kubectl(
                "exec", "trainer-1", "--", sys.executable, "-c", script, f"http://{address}:8000/v1/completions", body
            ).strip()  # fmt: skip
            if code == "200":
                if restarts(fleet, victim) > before:
                    pytest.fail(f"{victim} generated with the weights it loaded at its restart")
                return None, "still the old process"
            return (code if code == "503" and restarts(fleet, victim) > before else None), code

        assert wait_until(f"{victim} back and closed", closed, 180) == "503"
        assert fleet.ready_pods("vllm") == [other]
    finally:
        fleet.cluster.kubectl(*operator, "--replicas=1")
    fleet.wait_servers_ready(180)
    versions.commit_next()


# ---- pods that are not as they should be -------------------------------------------------------------------


def test_a_labelled_pod_without_the_backend_is_named_and_removing_it_is_enough(
    fleet: Fleet, versions: Versions
) -> None:
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "stranger",
            "labels": {"weightsync.dev/sync": "demo", "weightsync.dev/role": "inference", "app": "stranger"},
        },
        "spec": fleet.plain_python_pod("-m", "http.server", "8000"),
    }
    fleet.kubectl("apply", "-f", "-", input=json.dumps(stranger))
    try:
        wait_described(fleet, "stranger", "weight-transfer-config", seconds=90)
        versions.commit_next()
    finally:
        fleet.kubectl("delete", "pod", "stranger", "--grace-period=1", "--wait=true")
    wait_condition(fleet, "Ready", "True")


def test_a_spec_with_mixed_triggers_is_refused_with_what_to_write_instead(fleet: Fleet) -> None:
    bad = {
        "apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "metadata": {"name": "bad"},
        "spec": {"trigger": {"type": "OnPublish", "version": "step-1"}},
    }  # fmt: skip
    with pytest.raises(Exception, match="OnSpecVersion"):
        fleet.kubectl("apply", "-f", "-", input=json.dumps(bad))


def test_deleting_the_object_leaves_the_servers_serving(fleet: Fleet, versions: Versions) -> None:
    fleet.kubectl("delete", "wsync", "demo", "--timeout=30s")
    assert set(fleet.ask(versions.committed)) == set(servers(fleet))
    with pytest.raises(FleetError):
        wait_until("a pod losing its readiness", lambda: (len(fleet.ready_pods("vllm")) < 2 or None, ""), 5)
