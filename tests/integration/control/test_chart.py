"""The chart: what it renders is what an API server takes, and no more than the operator needs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.cluster import ApiServer
from tests.integration.control.conftest import ACCOUNT, SYSTEM, World, render
from tests.integration.control.fake_agents import eventually


@pytest.fixture
def as_operator(api: ApiServer) -> Callable[..., httpx.Response]:
    """Sends a request with the operator's own token."""
    token = api.token(SYSTEM, ACCOUNT)

    def send(method: str, path: str, body: Any = None, kind: str = "application/json") -> httpx.Response:
        with httpx.Client(base_url=api.url, verify=str(api.admin.ca), trust_env=False) as client:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            return client.request(method, path, content=json.dumps(body), headers=headers)

    return send


@pytest.mark.parametrize("field", ["labels", "phase", "conditions"])
def test_the_operators_account_may_change_only_its_one_condition_of_a_pod(
    world: World, as_operator: Callable[..., httpx.Response], field: str
) -> None:
    world.pod("vllm-a", world.fleet.inference())
    path = f"/api/v1/namespaces/{world.namespace}/pods/vllm-a/status"
    tried = itertools.count()

    def refused() -> bool:
        # Another value each time: what got through before the policy was in force is no change any more.
        value = f"v{next(tried)}"
        change: dict[str, Any] = {
            "labels": {"metadata": {"labels": {"app": value}}},
            "phase": {"status": {"phase": "Failed", "message": value}},
            "conditions": {"status": {"conditions": [{"type": "Ready", "status": "True", "reason": value}]}},
        }[field]
        answer = as_operator("PATCH", path, change, "application/strategic-merge-patch+json")
        return answer.status_code == 422 and "weightsync operator may" in answer.json()["message"]

    # A new policy takes the API server a moment.
    eventually(refused, within=40, every=0.2)
    ours = {"status": {"conditions": [{"type": "weightsync.dev/in-sync", "status": "True"}]}}
    assert as_operator("PATCH", path, ours, "application/strategic-merge-patch+json").status_code == 200


def test_the_operators_account_may_not_ask_for_tokens_of_others(
    api: ApiServer, as_operator: Callable[..., httpx.Response]
) -> None:
    api.service_account(SYSTEM, "somebody")
    request = {"spec": {"audiences": ["x"]}}
    for path, status in ((ACCOUNT, 201), ("somebody", 403)):
        answer = as_operator("POST", f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{path}/token", request)
        assert answer.status_code == status
    for path in ("/api/v1/secrets", "/api/v1/namespaces", "/api/v1/nodes"):
        assert as_operator("GET", path).status_code == 403


def test_an_installation_for_some_namespaces_asks_for_no_cluster_rights() -> None:
    objects = render("ops", "watchNamespaces={a,b}", "podStatusPolicy.enabled=false")
    assert {item["kind"] for item in objects} == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    (deployment,) = [item for item in objects if item["kind"] == "Deployment"]
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--namespace=a" in args
    assert "--namespace=b" in args
    assert "--all-namespaces" not in args
    assert {item["metadata"]["namespace"] for item in objects if item["kind"] == "Role"} == {"ops", "a", "b"}


def test_there_is_one_operator_and_it_is_unprivileged() -> None:
    # C50
    (deployment,) = [item for item in render(SYSTEM) if item["kind"] == "Deployment"]
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"livenessProbe", "readinessProbe", "startupProbe"} <= set(container)


def test_pod_defaults_complete_a_labelled_pod(api: ApiServer) -> None:
    namespace = api.namespace("defaults")
    api.namespace("ops2")
    wanted = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
    objects = render("ops2", "podDefaults.enabled=true", f"watchNamespaces={{{namespace}}}")
    api.apply(*[item for item in objects if item["kind"] in wanted])
    labels = {"weightsync.dev/sync": "w", "weightsync.dev/role": "inference"}
    made: list[dict[str, Any]] = []

    def completed() -> bool:
        made.append(api.pod(namespace, f"vllm-{len(made)}", labels=labels))
        gates = made[-1]["spec"].get("readinessGates")
        return bool(gates == [{"conditionType": "weightsync.dev/in-sync"}])

    eventually(completed, within=15, every=0.3)
    assert made[-1]["spec"]["enableServiceLinks"] is False
    other = [{"conditionType": "example.com/other"}]
    pod = api.pod(namespace, "gated", labels=labels, readinessGates=other)
    assert [gate["conditionType"] for gate in pod["spec"]["readinessGates"]] == [
        "example.com/other",
        "weightsync.dev/in-sync",
    ]
    trainer = api.pod(namespace, "trainer", labels={**labels, "weightsync.dev/role": "trainer"})
    assert "readinessGates" not in trainer["spec"]
