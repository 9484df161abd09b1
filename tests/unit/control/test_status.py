"""What the object shows."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace

import pytest
from tests.unit.control import builders
from tests.unit.control.builders import WALL, Sim

from weightsync_engine.protocol.messages import PlanSummary, Problem
from weightsync_operator import names
from weightsync_operator.api.types import Report
from weightsync_operator.core.rounds import plan
from weightsync_operator.core.status import report


def shown(sim: Sim, before: Report | None = None, wall: datetime.datetime = WALL) -> Report:
    observed = replace(sim.observed(), wall=wall)
    decided = plan(sim.memory, observed, sim.settings)
    return report(decided.memory, observed, decided.roster, before.conditions if before else (), sim.settings)


def verdicts(made: Report) -> dict[str, tuple[str, str]]:
    return {item.type: (item.status, item.reason) for item in made.conditions}


def test_all_conditions_are_there_from_the_first_look() -> None:
    sim = Sim(pods=0, trainers=0)
    made = shown(sim)
    assert verdicts(made) == {
        "Ready": ("False", names.NO_TRAINER),
        "MembersResolved": ("False", names.NO_TRAINER),
        "PlanResolved": ("Unknown", names.NO_EPOCH),
        "RendezvousEstablished": ("Unknown", names.NO_EPOCH),
        "InSync": ("False", names.NO_VERSION_YET),
        "Reconciling": ("True", names.NO_TRAINER),
        "Stalled": ("False", names.PROGRESSING),
    }
    assert (made.trainers, made.inference, made.version) == ("0/0", "0/0", None)


def test_ready_does_not_wait_for_the_first_publish_unless_the_spec_is_closed() -> None:
    sim = Sim()
    sim.run(lambda: sim.serving("vllm-1") and sim.memory.epoch is not None and sim.memory.epoch.joined)
    assert verdicts(shown(sim))["Ready"] == ("True", names.WAITING_FOR_FIRST_VERSION)
    assert verdicts(shown(sim))["InSync"] == ("False", names.NO_VERSION_YET)
    sim = Sim(beforeFirstVersion="Closed")
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    assert verdicts(shown(sim))["Ready"] == ("False", names.NO_VERSION_YET)


def test_a_round_in_the_course_of_things_does_not_make_ready_flap() -> None:
    sim = Sim()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    sim.step()
    sim.publish("step-2", 2)
    phases = set()
    for _ in range(40):
        sim.step()
        made = shown(sim)
        assert verdicts(made)["Ready"] == ("True", names.IN_SYNC_REASON)
        assert made.inference == "2/2"
        phases.add(verdicts(made)["Reconciling"][1])
    assert phases == {names.ROUND_RUNNING, names.IDLE}
    assert made.version == "step-2"


def test_an_operator_restart_does_not_make_ready_flap() -> None:
    sim = Sim()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    sim.restart_operator()
    for _ in range(40):
        assert verdicts(shown(sim))["Ready"][0] == "True"
        sim.step()


def test_transition_times_change_with_the_status_only() -> None:
    sim = Sim()
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    first = shown(sim)
    later = shown(sim, first, WALL + datetime.timedelta(hours=1))
    assert later == first
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    new = shown(sim, first, WALL + datetime.timedelta(hours=2))
    changed = {
        item.type
        for item, old in zip(new.conditions, first.conditions, strict=True)
        if item.last_transition_time != old.last_transition_time
    }
    assert "InSync" in changed
    assert "MembersResolved" not in changed


def test_members_show_ranks_version_and_state() -> None:
    sim = Sim(pods=1)
    sim.add("vllm-w", workers=4)
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    rows = [(row.pod, row.ranks, row.version, row.state) for row in shown(sim).members]
    assert rows == [
        ("trainer-0", "0", "step-1", "Idle"),
        ("vllm-0", "1", "step-1", "InSync"),
        ("vllm-w", "2-5", "step-1", "InSync"),
    ]


def test_a_member_that_is_written_in_place_says_that_it_stands_still() -> None:
    sim = Sim()
    for name in ("vllm-0", "vllm-1"):
        sim.agents[name].hold = frozenset({"transfer"})
    agent = sim.agents["vllm-0"]
    assert agent.state.inference is not None
    agent.update(inference=agent.state.inference.model_copy(update={"in_place": True}))
    sim.publish("step-1", 1)
    sim.run(lambda: "transfer vllm-1" in sim.log)
    sim.step()
    told = {row.pod: (row.state, row.message) for row in shown(sim).members}
    assert told["vllm-0"] == ("Transferring", "stands still: its live weights are written in place")
    assert told["vllm-1"] == ("Transferring", "")


def test_a_torn_pod_is_named_with_the_cause_in_ready_in_sync_and_its_row() -> None:
    sim = Sim()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    agent = sim.agents["vllm-1"]
    assert agent.state.inference is not None
    because = (
        "the live weights are of no one version: a whole round must succeed first (MoverLost: rank 2 is gone)"
    )
    torn = {"torn": True, "live_version": None, "serving": False, "closed_because": because, "in_place": True}
    agent.update(inference=agent.state.inference.model_copy(update=torn))
    sim.spec = sim.spec.model_copy(update={"suspend": True})  # or the round that mends it would begin
    sim.step()
    made = shown(sim)
    for kind in ("Ready", "InSync"):
        (said,) = [item for item in made.conditions if item.type == kind]
        assert (said.status, said.reason) == ("False", names.TORN)
        assert f"pod vllm-1: {because}" in said.message
    (row,) = [row for row in made.members if row.pod == "vllm-1"]
    assert (row.state, row.message) == (names.TORN, because)
    assert sim.gates["vllm-1"].reason == names.TORN


def test_a_failed_attempt_shows_in_ready_with_pod_cause_and_count() -> None:
    sim = Sim()
    sim.agents["vllm-1"].fail = {"transfer": Problem(reason="DigestMismatch", message="q_proj differs")}
    sim.publish("step-1", 1)
    sim.run(lambda: sim.memory.failure is not None and sim.memory.failure.failures == 3)
    made = shown(sim)
    (ready,) = [item for item in made.conditions if item.type == "Ready"]
    assert ready.reason == names.ROUND_FAILED
    for word in ("vllm-1", "q_proj differs", "DigestMismatch", "3 attempts"):
        assert word in ready.message
    assert verdicts(made)["Stalled"] == ("True", "DigestMismatch")
    assert made.rounds[0].attempts == 3


def test_the_object_stays_small_with_many_pods_and_long_reasons() -> None:
    # C46
    sim = Sim(pods=400)
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    assert sim.memory.epoch is not None
    long = PlanSummary(
        digest="d",
        parameters=18432,
        direct=17932,
        fallback=500,
        bytes_total=10**12,
        steps=9,
        reasons=("model.layers.47.mlp.experts.127.down_proj.weight: " + "x" * 400,) * 8,
    )
    sim.memory = replace(sim.memory, epoch=replace(sim.memory.epoch, plan=long))
    made = shown(sim)
    assert len(made.members) == 64
    assert made.members_not_shown == 401 - 64
    (resolved,) = [item for item in made.conditions if item.type == "PlanResolved"]
    assert "500 by vLLM's loader" in resolved.message
    assert len(resolved.message) <= 2048
    assert len(json.dumps(made.model_dump(mode="json", by_alias=True))) < 100 * 1024
    # The facts carry every identity; that grows with the pods, never with the model.
    assert len(sim.facts.model_dump_json(by_alias=True)) < 400 * 400


def test_a_cast_that_loses_bits_is_in_the_plan_and_one_event_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # C16
    first = tuple(f"model.layers.{i}.gate.bias (float32 to bfloat16)" for i in range(4))
    told = (
        "58 rounded on the way, with fewer bits in the servers than the trainer computes with: "
        f"{', '.join(first)} and 54 more"
    )
    summary = builders.PLAN.model_copy(update={"rounded": 58, "first_rounded": first, "draft": 2})
    monkeypatch.setattr(builders, "PLAN", summary)
    sim = Sim()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))
    made = shown(sim)
    (resolved,) = [item for item in made.conditions if item.type == "PlanResolved"]
    assert resolved.status == "True" and told in resolved.message
    assert "2 for draft models alone" in resolved.message
    assert verdicts(made)["Ready"][0] == "True"
    sim.publish("step-2", 2)
    sim.run(lambda: sim.in_sync("step-2"))
    assert [e for e in sim.events if e.startswith(names.EVENT_PRECISION_LOST)] == [
        f"{names.EVENT_PRECISION_LOST}: {told}"
    ]


def in_turn(sim: Sim, *published: tuple[str, str]) -> None:
    """Versions with the word for their weights, one round after the other."""
    for version, content in published:
        sim.agents["trainer-0"].content = content
        sequence = (sim.memory.last_committed.number if sim.memory.last_committed else 0) + 1
        sim.publish(version, sequence)
        sim.run(lambda version=version: sim.in_sync(version) and sim.memory.round is None)
        sim.step()


def test_three_versions_in_a_row_with_the_same_weights_are_a_warning_until_others_come() -> None:
    """C14: a version number that rises is no proof that training arrives."""
    sim = Sim()
    in_turn(sim, ("step-1", "aa"), ("step-2", "bb"), ("step-3", "bb"))
    made = shown(sim)
    assert verdicts(made)["InSync"] == ("True", names.IN_SYNC_REASON)
    assert made.last_round is not None and (made.last_round.content, made.last_round.alike) == ("bb", 2)
    assert not any(e.startswith(names.PAYLOAD_UNCHANGED) for e in sim.events)
    in_turn(sim, ("step-4", "bb"))
    made = shown(sim)
    assert verdicts(made)["InSync"] == ("True", names.PAYLOAD_UNCHANGED)
    assert verdicts(made)["Ready"] == ("True", names.PAYLOAD_UNCHANGED), "a warning, and no failure"
    (said,) = (item.message for item in made.conditions if item.type == "Ready")
    assert "payload unchanged" in said and "optimizer" in said
    in_turn(sim, ("step-5", "bb"))
    warnings = [e for e in sim.events if e.startswith(names.PAYLOAD_UNCHANGED)]
    assert len(warnings) == 2 and len(set(warnings)) == 1, "equal, so that they are one counted event"
    in_turn(sim, ("step-6", "cc"))
    assert verdicts(shown(sim))["InSync"] == ("True", names.IN_SYNC_REASON)


def test_the_same_version_again_and_rounds_of_unknown_content_are_not_counted_as_unchanged() -> None:
    # C14
    sim = Sim()
    in_turn(sim, ("step-1", "aa"))
    for number in range(3):  # each brings the same version to a pod that came late
        sim.add(f"late-{number}")
        sim.run(lambda number=number: sim.serving(f"late-{number}") and sim.memory.round is None)
        sim.step()
    assert sim.memory.last_committed is not None and sim.memory.last_committed.number > 1
    assert sim.memory.last_committed.alike == 1
    in_turn(sim, ("step-2", ""), ("step-3", ""), ("step-4", ""), ("step-5", ""))
    assert sim.memory.last_committed.alike == 1
