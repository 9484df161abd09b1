"""The bare API server that other integration tests stand on."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import jwt
import pytest
from tests.cluster import ApiServer, ClusterError, binaries

CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: rulers.example.dev}
spec:
  group: example.dev
  scope: Namespaced
  names: {kind: Ruler, plural: rulers, singular: ruler}
  versions:
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              properties: {low: {type: integer}, high: {type: integer}}
              x-kubernetes-validations:
                - {rule: "self.low <= self.high", message: low must not be above high}
"""


def ruler(low: int, high: int) -> str:
    spec = f"{{low: {low}, high: {high}}}"
    return f"apiVersion: example.dev/v1\nkind: Ruler\nmetadata: {{name: r}}\nspec: {spec}\n"


def until(ready: Callable[[], bool], what: str, deadline_s: float = 20) -> None:
    end = time.monotonic() + deadline_s
    while not ready():
        assert time.monotonic() < end, f"{what}: not after {deadline_s} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


# The first run of all builds the programs: minutes when Go's cache is cold.
pytestmark = pytest.mark.timeout(2400)


def test_a_crd_with_cel_is_served_and_enforced(server: ApiServer) -> None:
    server.kubectl("apply", "-f", "-", input=CRD)
    server.kubectl("wait", "--for=condition=Established", "crd/rulers.example.dev", "--timeout=20s")
    server.kubectl("apply", "-f", "-", input=ruler(1, 2))
    with pytest.raises(ClusterError, match="low must not be above high"):
        server.kubectl("apply", "-f", "-", input=ruler(3, 2))


def test_a_requested_token_is_verified_by_the_published_keys(server: ApiServer) -> None:
    namespace = server.namespace("tokens")
    token = server.token(namespace, "default", ["weightsync.dev/tokens/x"])
    # A pod's default service account may read the keys: that is what an agent does.
    reader = server.token(namespace, "default")
    answer = httpx.get(
        server.url + "/openid/v1/jwks",
        headers={"Authorization": f"Bearer {reader}"},
        verify=ssl.create_default_context(cafile=str(server.admin.ca)),
        trust_env=False,
    )
    assert answer.status_code == 200
    keys = jwt.PyJWKSet.from_dict(answer.json())
    key = keys[jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["RS256"], audience="weightsync.dev/tokens/x")
    assert claims["sub"] == "system:serviceaccount:tokens:default"


def test_rbac_is_on(server: ApiServer, tmp_path: Path) -> None:
    namespace = server.namespace("rbac")
    config = server.write_kubeconfig(tmp_path / "config", token=server.token(namespace, "default"))
    with pytest.raises(ClusterError, match="forbidden"):
        server.kubectl("--kubeconfig", str(config), "get", "secrets", "-n", namespace)


def test_a_test_can_play_the_kubelet(server: ApiServer) -> None:
    namespace = server.namespace("pods")
    server.pod(namespace, "p", labels={"a": "b"})
    pod = server.set_pod_status(namespace, "p", ip="10.0.0.9", ready=True)
    assert pod["status"]["podIP"] == "10.0.0.9"
    assert {c["type"]: c["status"] for c in pod["status"]["conditions"]}["Ready"] == "True"
    server.kubectl("delete", "pod", "-n", namespace, "p", "--wait=false")
    assert server.kubectl("get", "pods", "-n", namespace, "-o", "name") == ""


def test_a_restart_keeps_the_objects_and_the_address(server: ApiServer) -> None:
    url = server.url
    server.kubectl("create", "configmap", "kept", "--from-literal=a=b")
    server.stop_server()
    with pytest.raises(ClusterError):
        server.kubectl("get", "configmap", "kept", timeout=20)
    server.start_server()
    assert server.url == url
    assert server.kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"


def test_nothing_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    binaries.binary("kubectl")
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster", "apiserver"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        kubeconfig = Path(owner.stdout.readline().strip())
        folder = kubeconfig.parent
        assert folder.is_dir()
        assert _processes_with(str(folder))
    finally:
        owner.kill()
        owner.wait()
    until(lambda: not _processes_with(str(folder)), "the API server's processes end")
    until(lambda: not folder.exists(), "its folder goes")


def test_a_missing_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"`go` is not in PATH.*install Go 1\.\d+"), ApiServer():
        pass


def test_an_old_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.3\n")
    go.chmod(0o755)
    monkeypatch.setenv("WEIGHTSYNC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ClusterError, match=r"go1\.19\.3.*install Go 1\.\d+"):
        binaries.binary("kubectl")


def _processes_with(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found
