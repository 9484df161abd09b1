"""Rounds, by the real operator against a real API server."""

from __future__ import annotations

from tests.integration.control.conftest import Operator, World
from tests.integration.control.fake_agents import eventually


def test_every_published_version_reaches_all_pods(world: World, operator: Operator) -> None:
    trainer, one, two = world.fleet.trainer(), world.fleet.inference(), world.fleet.inference(workers=2)
    world.pod("trainer-0", trainer)
    world.pod("vllm-a", one)
    world.pod("vllm-b", two)
    world.object()
    operator.start()
    world.wait_condition("Ready", "True", "WaitingForFirstVersion")
    assert eventually(lambda: world.gate("vllm-a").get("status") == "True")
    for number, version in enumerate(("step-1", "step-2"), start=1):
        world.fleet.publish(version, number, trainer)
        world.wait_version(version)
        for agent in (one, two):
            assert agent.state.inference is not None
            assert agent.state.inference.live_version == version
            assert agent.state.inference.serving
    world.wait_condition("Ready", "True", "InSync")
    joined = [request for verb, request in two.requests if verb == "join"][-1]
    assert (joined.first_rank, joined.world_size, joined.trainer_ranks) == (2, 4, 1)  # type: ignore[attr-defined]
