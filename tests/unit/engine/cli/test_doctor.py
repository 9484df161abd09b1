"""`weightsync doctor` with a stand-in for kubectl, and inside a process."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weightsync_engine.cli.main import main

KUBECTL = Path(__file__).with_name("kubectl_stand_in.py")
SECRETS = ("hunter2", "hf_abcdefghijklmnop", "eyJhbGciOiJSUzI1NiJ9", "s3cr3t-in-args")


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """Puts the stand-in into PATH; returns a way to change what it answers."""
    path = tmp_path / "bin" / "kubectl"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {KUBECTL} {tmp_path / "script.json"} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    def script(**changes):
        (tmp_path / "script.json").write_text(json.dumps(changes))

    script()
    return script


def doctor(capsys, *arguments):
    status = main(["doctor", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_fleet_in_order_has_no_findings(kubectl, capsys):
    status, out, _ = doctor(capsys, "policy", "-n", "rl")
    assert "## findings (0)" in out, out
    assert status == 0
    for words in (
        "serverVersion: v1.37.2",
        "CRD weightsyncs.weightsync.dev: serves v1alpha1",
        "Ready                    True     InSync",
        "member pod vllm-0, role inference",
        "round number 7",
        "RoundFailed x3 WeightSync/policy: version step-6: pod vllm-0: rank 2 is gone",
        "Warning Unhealthy x2 Pod/vllm-0",
        "vllm-0: inference, Running, uid uid-vllm-0, IP 10.0.0.3, node node-1",
        "also set: HF_TOKEN, WANDB_API_KEY",
        "VLLM_PLUGINS=weightsync",
        '/readyz on port 8000: {"ready": true}',
        "[pod/vllm-0/vllm] agent listens",
        "torch 2.11.0",
        "holderIdentity operator-1",
        "rl/policy: Committed: version step-7",
    ):
        assert words in out, words


def test_no_secret_is_in_the_report(kubectl, capsys):
    _, out, _ = doctor(capsys, "policy", "-n", "rl")
    assert [secret for secret in SECRETS if secret in out] == []


def test_what_a_pod_lacks_is_said_first(kubectl, capsys):
    kubectl(bare=True)
    status, out, _ = doctor(capsys, "policy", "-n", "rl")
    assert status == 1
    findings = out.split("\n\n")[1]
    for words in (
        "vllm-0 has no readiness gate weightsync.dev/in-sync",
        "vllm-0 has no readiness probe on /readyz",
        "vllm-0 starts vLLM without --weight-transfer-config",
        "vllm-0 does not set VLLM_PLUGINS=weightsync",
        "container vllm of vllm-0 has restarted 2 times, the last time by exit 137 (OOMKilled)",
        "no pod has the labels weightsync.dev/sync of this object and weightsync.dev/role=trainer",
    ):
        assert words in findings, words
    assert "log of vllm-0 before its restart" in out and "the last words" in out


def test_a_command_that_hangs_or_fails_becomes_a_line_and_the_rest_is_there(kubectl, capsys):
    kubectl(hang=["logs vllm-0"], fail={"get lease": "leases.coordination.k8s.io is forbidden"})
    started = time.monotonic()
    status, out, _ = doctor(capsys, "policy", "-n", "rl", "--timeout", "6")
    assert time.monotonic() - started < 40
    assert status == 1
    assert "log of vllm-0: `" in out and "gave no answer within 6 s" in out
    assert "leases.coordination.k8s.io is forbidden" in out
    assert "[pod/trainer-0/train]" in out


def test_a_cluster_that_does_not_answer_is_told_and_not_a_crash(kubectl, capsys):
    kubectl(down=True)
    status, out, _ = doctor(capsys, "policy", "-n", "rl")
    assert status == 1
    assert "connection refused" in out and "clientVersion: v1.37.2" in out


def test_an_object_that_is_not_there_is_a_finding(kubectl, capsys):
    kubectl(fail={"get weightsyncs.weightsync.dev": 'weightsyncs.weightsync.dev "policy" not found'})
    status, out, _ = doctor(capsys, "policy", "-n", "rl")
    assert status == 1 and 'weightsyncs.weightsync.dev "policy" not found' in out


def test_flags_reach_kubectl_and_the_report_a_file(kubectl, capsys, tmp_path):
    kubectl(context="other")
    report = tmp_path / "report.md"
    status, out, err = doctor(
        capsys, "policy", "-n", "rl", "--context", "other", "--output", str(report), "--no-exec"
    )
    assert (status, out) == (0, "") and "0 findings" in err
    assert "torch 2.11.0" not in report.read_text()
    assert main(["doctor", "policy", "-n", "rl", "--output", str(tmp_path / "no" / "folder")]) == 2


def test_without_kubectl_a_person_is_told_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, err = doctor(capsys, "policy")
    assert status == 2 and "no kubectl in PATH" in err


# ---- inside a pod ------------------------------------------------------------------------------------------


@pytest.fixture
def agent():
    """Answers /readyz; `said` is what."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(server.said).encode()
            self.send_response(200 if server.said.get("ready") else 503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.said = {"ready": True}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def mover():
    """A process that looks like one."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "weightsync_engine.mover"],
        stdin=subprocess.PIPE,
    )
    yield process
    process.kill()
    process.communicate()


def test_inside_a_pod_versions_limits_settings_movers_and_the_agent_are_told(
    agent, mover, monkeypatch, capsys
):
    monkeypatch.setenv("WEIGHTSYNC_POD_NAME", "vllm-0")
    monkeypatch.setenv("WEIGHTSYNC_POD_IP", "127.0.0.1")
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED", "nothing of ours")
    _, out, _ = doctor(capsys, "--port", str(agent.server_port))
    for words in (
        "WEIGHTSYNC_POD_NAME=vllm-0",
        "VLLM_API_KEY=<removed>",
        "NCCL_DEBUG=INFO",
        "python 3.",
        "torch ",
        "/dev/shm: ",
        "limit of memlock: ",
        f"{mover.pid} ",
        'readyz: HTTP 200: {"ready": true}',
    ):
        assert words in out, words
    assert "hunter2" not in out and "nothing of ours" not in out


def test_an_agent_that_waits_or_is_none_is_a_finding(agent, mover, monkeypatch, capsys):
    monkeypatch.delenv("WEIGHTSYNC_POD_IP", raising=False)
    agent.said = {"ready": False, "waiting_for": "the operator to admit it"}
    status, out, _ = doctor(capsys, "--port", str(agent.server_port))
    assert status == 1 and "it waits for the operator to admit it" in out
    agent.said = {"something": "else"}
    assert "is no agent" in doctor(capsys, "--port", str(agent.server_port))[1]
    agent.shutdown()
    agent.server_close()
    status, out, _ = doctor(capsys, "--port", str(agent.server_port), "--timeout", "2")
    assert status == 1 and f"no agent answers on port {agent.server_port}" in out
