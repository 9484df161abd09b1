"""What every other end-to-end test takes for granted of its cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.cluster import Cluster, ClusterError, host_env_image, host_python_volumes, operator_image

NAMESPACE = "cluster-smoke"
# The first test of a session may have to build the whole cluster.
pytestmark = pytest.mark.timeout(2400)


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=yaml.safe_dump_all(objects))


def pod(name: str, *command: str, **extra: Any) -> dict[str, Any]:
    """A pod that runs this machine's Python."""
    volumes, mounts = host_python_volumes()
    container = {
        "name": "main",
        "image": host_env_image().ref,
        "imagePullPolicy": "Never",
        "command": [sys.executable, "-u", *command],
        "volumeMounts": mounts,
        "securityContext": {"readOnlyRootFilesystem": True},
        **extra,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": volumes,
        },
    }


def output_of(cluster: Cluster, name: str) -> str:
    """What a pod that ends by itself has printed, once it has succeeded."""
    try:
        cluster.kubectl(
            "wait",
            "-n",
            NAMESPACE,
            f"pod/{name}",
            "--for=jsonpath={.status.phase}=Succeeded",
            "--timeout=90s",
            timeout=100,
        )
    except ClusterError as error:
        status = json.loads(cluster.kubectl("get", "pod", "-n", NAMESPACE, name, "-o", "json"))["status"]
        pytest.fail(f"{error}\n{json.dumps(status, indent=1)}")
    return cluster.kubectl("logs", "-n", NAMESPACE, name)


@pytest.fixture(scope="module", autouse=True)
def namespace(cluster: Cluster) -> Iterator[None]:
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        if cluster.kind_of != "named":
            cluster.load_image(host_env_image().archive)
        yield
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=true", timeout=90)


def test_a_pod_runs_the_hosts_python_with_torch(cluster: Cluster) -> None:
    apply(cluster, pod("torch", "-c", "import torch; print(torch.arange(4).sum().item())"))
    assert output_of(cluster, "torch").strip() == "6"


def test_services_are_found_by_name_from_every_node(cluster: Cluster) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    probe = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    apply(cluster, service, pod("web", "-m", "http.server", "8000", "-d", "/usr", readinessProbe=probe))
    cluster.kubectl("wait", "-n", NAMESPACE, "pod/web", "--for=condition=Ready", "--timeout=60s", timeout=70)
    code = (
        "import urllib.request as u\n"
        f"for name in ('web', 'web.{NAMESPACE}.svc.cluster.local'):\n"
        "    print(u.urlopen(f'http://{name}/', timeout=10).status)"
    )
    nodes = cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    for number, node in enumerate(nodes):
        client = pod(f"client-{number}", "-c", code)
        client["spec"] |= {"nodeName": node}
        apply(cluster, client)
    for number, _ in enumerate(nodes):
        assert output_of(cluster, f"client-{number}").split() == ["200", "200"]


def test_the_operator_image_holds_the_operator(cluster: Cluster) -> None:
    if cluster.kind_of == "named":
        pytest.skip("images cannot be loaded into a named cluster")
    image = operator_image()
    cluster.load_image(image.archive)
    body = pod("operator")
    code = "import kopf, kubernetes, ssl, weightsync_operator, os; print(os.getuid())"
    body["spec"] |= {
        "volumes": [],
        "containers": [
            {
                "name": "main",
                "image": image.ref,
                "imagePullPolicy": "Never",
                "command": ["/usr/bin/python3", "-c", code],
                "securityContext": {
                    "runAsNonRoot": True,
                    "readOnlyRootFilesystem": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
    apply(cluster, body)
    assert output_of(cluster, "operator").strip() == "65532"
