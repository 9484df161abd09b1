"""What the object shows."""

from __future__ import annotations

import datetime
import json

from tests.unit.control.builders import WALL, Sim

from weightsync_engine.protocol.messages import PlanSummary, Problem
from weightsync_operator import names
from weightsync_operator.api.types import Report
from weightsync_operator.core.rounds import plan, replace
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
