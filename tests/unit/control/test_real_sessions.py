"""The planner and the agents' session machine, face to face: what one asks, the other takes."""

from __future__ import annotations

import pytest
from tests.unit.control.real_sessions import RealAgent, RealSim

from weightsync_engine.protocol.messages import Problem
from weightsync_operator import names


def at_version(version: str = "step-1", **spec: object) -> RealSim:
    sim = RealSim(retry={"backoffSeconds": 1, "maxBackoffSeconds": 2}, **spec)
    sim.publish(version, 1)
    sim.run(lambda: sim.in_sync(version))
    return sim


def agent(sim: RealSim, name: str) -> RealAgent:
    found = sim.agents[name]
    assert isinstance(found, RealAgent)
    return found


def test_versions_travel_without_a_single_refusal() -> None:
    sim = at_version()
    for number in range(2, 5):
        sim.publish(f"step-{number}", number)
        sim.run(lambda: sim.in_sync(f"step-{number}"))  # noqa: B023
    assert sim.refused == []
    assert sim.facts.epoch is not None
    assert sim.facts.epoch.number == 1


def test_a_round_aborted_in_the_middle_costs_one_failure_and_a_new_epoch() -> None:
    sim = at_version()
    agent(sim, "vllm-1").fail = {"transfer": Problem(reason="Broken", message="step 3 broke", rank=2)}
    sim.publish("step-2", 2)
    sim.run(lambda: sim.memory.failure is not None)
    assert sim.memory.failure is not None
    assert (sim.memory.failure.what, sim.memory.failure.culprit) == ("round", "vllm-1")
    agent(sim, "vllm-1").fail = {}
    sim.run(lambda: sim.in_sync("step-2"))
    # The epoch that went down with the round is not told as a second failure.
    assert [event.split(":")[0] for event in sim.events].count(names.EPOCH_FAILED) == 0
    assert [event.split(":")[0] for event in sim.events].count(names.ROUND_FAILED) == 1


def test_a_flip_that_fails_is_tried_again_within_the_deadline() -> None:
    sim = at_version(deadlines={"commitSeconds": 20})
    agent(sim, "vllm-1").fail = {"flip": Problem(reason="FlipFailed", message="device busy")}
    sim.publish("step-2", 2)
    sim.run(lambda: sim.live("vllm-0") == "step-2")
    sim.step()
    assert not sim.serving("vllm-1")
    agent(sim, "vllm-1").fail = {}
    sim.run(lambda: sim.in_sync("step-2"))
    assert [entry.version for entry in sim.memory.rounds] == ["step-2", "step-1"]
    assert sim.memory.rounds[0].culprit == ""


def test_a_flip_that_fails_for_good_leaves_the_pod_closed_until_another_epoch() -> None:
    sim = at_version(deadlines={"commitSeconds": 2})
    agent(sim, "vllm-1").fail = {"flip": Problem(reason="FlipFailed", message="device lost")}
    sim.publish("step-2", 2)
    sim.run(lambda: sim.memory.rounds[0].version == "step-2", seconds=1.0)
    assert sim.memory.rounds[0].culprit == "vllm-1"
    assert (sim.live("vllm-0"), sim.serving("vllm-0")) == ("step-2", True)
    assert not sim.serving("vllm-1")
    agent(sim, "vllm-1").fail = {}
    sim.run(lambda: sim.in_sync("step-2"))


@pytest.mark.parametrize("phase", ["prepare", "transfer", "confirm", "commit"])
def test_the_operator_may_die_in_any_phase(phase: str) -> None:
    sim = at_version()
    if phase == "commit":
        for name in ("vllm-0", "vllm-1"):
            agent(sim, name).hold = frozenset({"commit"})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.memory.round is not None and sim.memory.round.phase == phase, seconds=0.01)
    sim.restart_operator()
    for found in sim.agents.values():
        found.release()
    sim.run(lambda: sim.in_sync("step-2"))
    assert sim.facts.term == 2


def test_a_pod_cut_off_after_the_decision_learns_it_from_the_lead_or_stays_closed() -> None:
    sim = at_version(deadlines={"prepareSeconds": 1, "transferSeconds": 1, "commitSeconds": 10})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    sim.silent["vllm-1"] = sim.now
    sim.run(lambda: sim.live("vllm-0") == "step-2")
    # The operator never reaches it again, the lead's agent answers.
    sim.run(lambda: sim.live("vllm-1") == "step-2", seconds=1.0)
    del sim.silent["vllm-1"]
    sim.run(lambda: sim.in_sync("step-2"))


def test_a_new_object_takes_over_pods_of_a_deleted_one() -> None:
    sim = at_version()
    fresh = RealSim()
    fresh.agents, fresh.may_serve = sim.agents, sim.may_serve
    for found in fresh.agents.values():
        assert isinstance(found, RealAgent)
        found.sim = fresh
    fresh.now = sim.now
    observed = fresh.observed

    def other() -> object:
        return observed().__class__(**{**observed().__dict__, "uid": "another-object"})

    fresh.observed = other  # type: ignore[assignment, method-assign]
    fresh.run(lambda: fresh.memory.epoch is not None and fresh.memory.epoch.joined)
    assert fresh.serving("vllm-0")
    fresh.run(lambda: fresh.in_sync("step-1"))
