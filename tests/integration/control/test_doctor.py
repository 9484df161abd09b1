"""`weightsync doctor` by a real kubectl against a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.binaries import binaries
from tests.integration.control.conftest import Operator, World
from tests.integration.control.test_rounds import small_world

from weightsync_engine.cli.main import main
from weightsync_engine.protocol.messages import Problem


def test_the_report_has_the_object_its_pods_their_events_and_the_lease(
    world: World, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").symlink_to(binaries("kubectl")["kubectl"])
    monkeypatch.setenv("PATH", str(tmp_path))
    trainer, _, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    two.script.transfer_problem = Problem(reason="PeerLate", message="rank 3 (pod vllm-b) is late", rank=3)
    world.fleet.publish("step-2", 2, trainer)
    world.wait_condition("Stalled", "True", "PeerLate")
    report = tmp_path / "report.md"
    arguments = ["-n", world.namespace, "--kubeconfig", str(world.api.kubeconfig), "--timeout", "10"]
    assert main(["doctor", "w", *arguments, "--output", str(report)]) == 1
    text = report.read_text()
    findings = text.split("## ")[1]
    # Nobody plays the kubelet: logs and what is inside cannot be had, and the report says so.
    for words in (
        "Stalled is True: PeerLate",
        "rank 3 (pod vllm-b) is late",
        "log of vllm-a: `",
        "inside vllm-a: ",
        "vllm-a has no readiness probe on /readyz",
    ):
        assert words in findings, words
    for words in (
        "serverVersion: v1.",
        "CRD weightsyncs.weightsync.dev: serves v1alpha1",
        "kind: WeightSync",
        "trainer-0: trainer, Running",
        "vllm-b: inference, Running",
        "RoundFailed",
        "holderIdentity test",
    ):
        assert words in text, words
    assert "no operator runs in namespace weightsync-system" in text  # as a pod
    two.script.transfer_problem = None
    world.wait_version("step-2")
