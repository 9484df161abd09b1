"""Pods that are not as they should be: the object says which and what to do."""

from __future__ import annotations

from tests.integration.control.conftest import Operator, World
from tests.integration.control.fake_agents import eventually


def test_each_pod_that_is_not_right_is_named_with_the_remedy(world: World, operator: Operator) -> None:
    # C48
    trainer, good, bare, stranger = (
        world.fleet.trainer(),
        world.fleet.inference(),
        world.fleet.inference(),
        world.fleet.inference(),
    )
    world.pod("trainer-0", trainer)
    world.pod("vllm-good", good)
    world.pod("vllm-nogate", bare, gate=False)
    world.pod("vllm-stranger", stranger)
    stranger.name = "another-object"  # so it refuses a token for this one
    # Nothing listens there.
    world.pod("vllm-silent", None, "inference", port=1)
    world.object()
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")

    def row(pod: str) -> dict[str, str]:
        return next(row for row in world.status()["members"] if row["pod"] == pod)

    eventually(lambda: row("vllm-nogate")["state"] == "InSync")
    assert row("vllm-silent")["state"] == "AgentSilent"
    assert "--weight-transfer-config" in row("vllm-silent")["message"]
    assert row("vllm-stranger")["state"] == "AgentRefusesToken"
    condition = world.wait_condition("MembersResolved", "False")
    assert any(pod in condition["message"] for pod in ("vllm-stranger", "vllm-nogate"))
    world.wait_condition("Ready", "False")
    assert {"AgentRefusesToken", "ReadinessGateMissing"} <= {event["reason"] for event in world.events()}
    # Mending one after the other is enough.
    stranger.name = "w"
    eventually(
        lambda: stranger.state.inference and stranger.state.inference.live_version == "step-1", within=30
    )
    for pod in ("vllm-nogate", "vllm-silent"):
        world.api.kubectl("delete", "pod", pod, "-n", world.namespace, "--wait=false")
    world.wait_condition("Ready", "True", "InSync")


def test_two_training_runs_are_named_until_one_is_gone(world: World, operator: Operator) -> None:
    world.pod("trainer-old", world.fleet.trainer())
    world.pod("trainer-new", world.fleet.trainer(run_id="run-2"))
    world.pod("vllm-a", world.fleet.inference())
    world.object()
    condition = world.wait_condition("MembersResolved", "False", "TwoLeads")
    assert "trainer-new and trainer-old" in condition["message"]
    world.wait_condition("Stalled", "True", "TwoLeads")
    world.api.kubectl("label", "pod", "trainer-old", "weightsync.dev/sync-", "-n", world.namespace)
    world.wait_condition("Ready", "True", "WaitingForFirstVersion")


def test_zero_parameters_and_differing_plans_are_stated(world: World, operator: Operator) -> None:
    trainer, one = world.fleet.trainer(), world.fleet.inference()
    trainer.script.parameters = one.script.parameters = 0
    world.pod("trainer-0", trainer)
    world.pod("vllm-a", one)
    world.object()
    condition = world.wait_condition("PlanResolved", "False", "ZeroParameters")
    assert "trainer-0" in condition["message"]
    trainer.script.parameters = one.script.parameters = 3
    one.script.plan_digest = "another"
    world.wait_condition("PlanResolved", "False", "PlansDiffer")
    # A pod that cannot take part for its own reasons leaves the servers serving what they have.
    eventually(lambda: world.gate("vllm-a").get("status") == "True")
    one.script.plan_digest = "d1"
    world.wait_condition("Ready", "True", "WaitingForFirstVersion")
