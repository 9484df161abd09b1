"""The sample that users copy has what a pod needs beyond labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

SAMPLE = Path(__file__).parents[2] / "examples" / "demo" / "manifests.yaml"
PODS = [
    document["spec"]["template"]
    for document in yaml.safe_load_all(SAMPLE.read_text())
    if document["kind"] in ("Deployment", "StatefulSet")
]


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["metadata"]["labels"]["weightsync.dev/role"])
def test_shared_memory_is_more_than_a_containers_default(pod: dict[str, Any]) -> None:
    # C51
    memory = {v["name"] for v in pod["spec"]["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"}
    for container in pod["spec"]["containers"]:
        mounted = {m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/dev/shm"}
        assert mounted and mounted <= memory


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["metadata"]["labels"]["weightsync.dev/role"])
def test_services_set_no_environment_and_the_agents_port_has_its_name(pod: dict[str, Any]) -> None:
    assert pod["spec"]["enableServiceLinks"] is False
    (container,) = pod["spec"]["containers"]
    assert [port["name"] for port in container["ports"]] == ["weightsync"]


def test_servers_are_ready_by_their_agents_word_and_the_operators() -> None:
    (pod,) = [p for p in PODS if p["metadata"]["labels"]["weightsync.dev/role"] == "inference"]
    assert pod["spec"]["readinessGates"] == [{"conditionType": "weightsync.dev/in-sync"}]
    (container,) = pod["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
