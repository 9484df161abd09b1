"""Given what is seen: exactly which facts, requests and gates follow, in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.control.builders import WALL, Sim, inference_state, pod_with

from weightsync_engine.protocol.messages import (
    AgentState,
    EpochPhase,
    EpochState,
    FlipPolicy,
    Prepare,
    Problem,
    RoundPhase,
)
from weightsync_operator import names
from weightsync_operator.api.types import MAX_EARLIER
from weightsync_operator.core.members import AgentView
from weightsync_operator.core.rounds import RoundRun, committed_version, plan, usable_host
from weightsync_operator.core.status import report


def joined(**spec: Any) -> Sim:
    """A fleet whose first epoch is up, nothing published."""
    sim = Sim(**spec)
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    sim.run(lambda: not sim.step().sends)
    sim.log.clear()
    sim.events.clear()
    return sim


def at_version(version: str = "step-1", **spec: Any) -> Sim:
    sim = joined(**spec)
    sim.publish(version, 1)
    sim.run(lambda: sim.in_sync(version))
    sim.step()
    sim.log.clear()
    sim.events.clear()
    return sim


def test_an_epoch_is_recorded_first_and_the_lead_joins_before_the_others() -> None:
    sim = Sim(trainers=2)
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    steps = [entry for entry in sim.log if not entry.startswith("admit")]
    assert steps == [
        "record epoch 1",
        "join trainer-0",
        "join trainer-1",
        "join vllm-0",
        "join vllm-1",
    ]


def test_a_membership_that_still_changes_is_left_alone() -> None:
    sim = Sim()
    sim.settings = sim.settings.__class__(quiet=2.0)
    for index in range(5):
        sim.add(f"late-{index}")
        sim.step(seconds=1.5)
    assert sim.facts.epoch is None
    sim.step(seconds=2.1)
    assert sim.facts.epoch is not None
    assert len(sim.facts.epoch.members) == 8


def test_a_round_goes_prepare_transfer_confirm_decide_commit() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.committed("step-1"))
    assert sim.log == [
        "prepare trainer-0",
        "prepare vllm-0",
        "prepare vllm-1",
        "transfer trainer-0",
        "transfer vllm-0",
        "transfer vllm-1",
        "read trainer-0",
        "read vllm-0",
        "read vllm-1",
        "record decision step-1",
        "commit trainer-0",
        "commit vllm-0",
        "commit vllm-1",
        "record finished step-1",
    ]


def test_nothing_is_done_and_nothing_said_while_all_is_well() -> None:
    sim = at_version()
    for _ in range(20):
        decided = sim.step(seconds=60)
        assert (decided.facts, decided.sends, decided.gates, decided.events) == (None, (), (), ())
        assert decided.wake_in == sim.settings.resync
    assert sim.log == []


def test_a_restarted_operator_rolls_a_recorded_decision_forward() -> None:
    sim = at_version()
    sim.publish("step-2", 2)
    for name in ("vllm-0", "vllm-1"):
        sim.agents[name].hold = frozenset({"commit"})
    sim.run(lambda: "commit vllm-1" in sim.log)
    sim.restart_operator()
    for agent in sim.agents.values():
        agent.hold = frozenset()
    sim.log.clear()
    sim.run(lambda: sim.in_sync("step-2"))
    assert sim.log == ["commit vllm-0", "commit vllm-1", "record finished step-2"]
    assert sim.memory.round is None
    assert any(event.startswith(names.EVENT_ROLLED_FORWARD) for event in sim.events)


def test_a_trainers_agent_that_restarts_just_after_the_record_is_told_of_the_decision() -> None:
    sim = at_version()
    sim.publish("step-2", 2)
    sim.run(lambda: sim.log[-1:] == ["record decision step-2"])
    trainer = sim.agents["trainer-0"]
    trainer.restart()
    assert trainer.state.trainer is not None
    trainer.update(trainer=trainer.state.trainer.model_copy(update={"committed": None}))
    sim.log.clear()
    sim.run(lambda: sim.committed("step-2"))
    sim.run(lambda: "commit trainer-0" in sim.log, steps=3)


def test_numbers_of_rounds_grow_over_a_restart_after_a_finished_decision() -> None:
    sim = at_version()
    before = sim.facts.decision
    assert before is not None and before.finished
    sim.restart_operator()
    sim.publish("step-2", 2)
    sim.run(lambda: sim.in_sync("step-2"))
    after = sim.facts.decision
    assert after is not None and after.round > before.round


def test_a_restarted_operator_aborts_a_round_without_a_decision_and_repeats_it() -> None:
    sim = joined()
    sim.agents["vllm-1"].hold = frozenset({"transfer"})
    sim.publish("step-1", 1)
    sim.run(lambda: "transfer vllm-1" in sim.log)
    sim.restart_operator()
    sim.log.clear()
    sim.step()
    assert sim.log == ["abort trainer-0", "abort vllm-0", "abort vllm-1"]
    sim.agents["vllm-1"].hold = frozenset()
    sim.run(lambda: sim.in_sync("step-1"))


def test_a_decision_whose_write_failed_is_not_acted_on() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.log[-1:] == ["read vllm-1"])
    for _ in range(5):
        decided = sim.step(write=False)
        assert decided.facts is not None
        assert decided.sends == ()
    sim.run(lambda: sim.committed("step-1"))


def test_after_decide_by_a_verified_round_is_aborted_not_decided() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.memory.round is not None and sim.memory.round.phase == "confirm")
    assert sim.memory.round is not None
    sim.now = sim.memory.round.decide_by + 1
    sim.step()
    assert sim.memory.round is None
    assert sim.facts.decision is None
    # The agents wait longer than the operator decides.
    assert "abort vllm-0" in sim.log


def test_agents_are_told_a_later_decide_by_than_the_operator_keeps() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    decided = sim.step()
    run = decided.memory.round
    assert isinstance(run, RoundRun)
    (prepare, *_) = [send.request for send in decided.sends if send.verb == "prepare"]
    assert prepare.decide_by_seconds > run.decide_by - run.started + 5  # type: ignore[attr-defined]


def test_a_confirmation_must_be_asked_after_all_were_verified() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.memory.round is not None and sim.memory.round.phase == "confirm")
    assert sim.facts.decision is None
    # One does not answer the question: no decision, however long the others agree.
    sim.fresh["vllm-1"] = 0.0
    sim.silent["vllm-1"] = sim.now
    for _ in range(5):
        sim.step()
        assert sim.facts.decision is None


def test_a_failed_transfer_is_blamed_on_the_pod_of_the_rank_and_retried_with_backoff() -> None:
    sim = at_version(retry={"backoffSeconds": 4, "maxBackoffSeconds": 8})
    sim.agents["vllm-0"].fail = {"transfer": Problem(reason="PeerLost", message="rank 2 closed", rank=2)}
    sim.publish("step-2", 2)
    sim.run(lambda: bool(sim.memory.rounds and sim.memory.rounds[0].outcome == "Aborted"))
    entry = sim.memory.rounds[0]
    assert (entry.culprit, entry.reason, entry.version) == ("vllm-1", "PeerLost", "step-2")
    assert "vllm-1" in entry.message
    assert sim.events == ["RoundFailed: version step-2: pod vllm-1: rank 2 closed (PeerLost)"]
    assert sim.memory.failure is not None
    sim.step()
    assert {"abort trainer-0", "abort vllm-1"} <= set(sim.log)
    # The other servers serve the old version meanwhile.
    assert (sim.live("vllm-0"), sim.serving("vllm-0")) == ("step-1", True)
    pauses = []
    for _ in range(3):
        began = sim.now
        count = sim.memory.failure.failures
        sim.run(lambda: sim.memory.failure is not None and sim.memory.failure.failures > count)  # noqa: B023
        pauses.append(sim.now - began)
    assert pauses == sorted(pauses)
    assert 4 <= pauses[0] < 6
    assert 8 <= pauses[-1] < 10
    assert len({event for event in sim.events if event.startswith("RoundFailed")}) == 1
    # The last good round is still to be seen.
    assert [entry.outcome for entry in sim.memory.rounds] == ["Aborted", "Committed"]
    sim.agents["vllm-0"].fail = {}
    sim.run(lambda: sim.in_sync("step-2"))


@pytest.mark.parametrize("phase", ["prepare", "transfer"])
def test_whoever_misses_a_deadline_is_named(phase: str) -> None:
    sim = joined(deadlines={f"{phase}Seconds": 10})
    sim.agents["vllm-1"].hold = frozenset({phase})
    sim.publish("step-1", 1)
    sim.run(lambda: bool(sim.memory.rounds), seconds=1.0)
    entry = sim.memory.rounds[0]
    assert (entry.culprit, entry.reason) == ("vllm-1", names.DEADLINE_EXCEEDED)
    assert "vllm-1" in entry.message


@pytest.mark.parametrize("how", ["deleted", "restarted", "terminating", "silent"])
def test_a_member_lost_in_a_round_ends_it_at_once_and_the_next_goes_without(how: str) -> None:
    # C06
    sim = joined()
    sim.agents["vllm-1"].hold = frozenset({"transfer"})
    sim.publish("step-1", 1)
    sim.run(lambda: "transfer vllm-1" in sim.log)
    if how == "deleted":
        sim.gone.add("vllm-1")
    elif how == "restarted":
        sim.agents["vllm-1"].restart()
        sim.agents["vllm-1"].hold = frozenset()
    elif how == "terminating":
        sim.terminating.add("vllm-1")
    else:
        sim.silent["vllm-1"] = sim.now
        sim.now += 5
    sim.step()
    assert sim.memory.rounds[0].culprit == "vllm-1"
    assert sim.facts.decision is None
    sim.run(lambda: sim.committed("step-1"))
    assert sim.live("vllm-0") == "step-1"
    assert sim.live("vllm-1") == ("step-1" if how == "restarted" else None)


def test_a_drain_does_not_abort_a_round_that_is_verified() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: sim.memory.round is not None and sim.memory.round.phase == "confirm")
    sim.terminating.add("vllm-1")
    sim.run(lambda: sim.committed("step-1"))
    assert sim.live("vllm-1") == "step-1"


def test_a_pod_that_restarts_during_a_round_is_not_promoted_by_it() -> None:
    # C07
    sim = at_version()
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    sim.agents["vllm-1"].restart()
    sim.run(lambda: sim.committed("step-2"))
    # The new process holds what it loaded: closed, whatever the round said of its predecessor.
    assert (sim.live("vllm-1"), sim.serving("vllm-1")) == (None, False)
    assert not sim.gates["vllm-1"].status
    # Then it catches up, in an epoch of its own identity.
    sim.run(lambda: sim.in_sync("step-2"))
    assert sim.facts.epoch is not None
    assert sim.facts.epoch.number == 2


def test_a_newcomer_is_closed_until_it_has_the_version_while_the_others_serve() -> None:
    sim = at_version()
    late = sim.add("vllm-9")
    late.hold = frozenset({"transfer"})
    sim.run(lambda: "transfer vllm-9" in sim.log)
    assert not sim.serving("vllm-9")
    assert sim.gates["vllm-9"] == sim.gates["vllm-9"].__class__(False, names.OUT_OF_SYNC)
    assert sim.serving("vllm-0")
    assert sim.gates["vllm-0"].status
    late.release()
    sim.run(lambda: sim.in_sync("step-1"))
    sim.step()
    assert sim.gates["vllm-9"].status


def test_a_server_that_serves_something_else_is_fenced() -> None:
    sim = at_version()
    agent = sim.agents["vllm-1"]
    assert agent.state.inference is not None
    agent.update(inference=agent.state.inference.model_copy(update={"live_version": "step-0"}))
    sim.may_serve.add("step-0")
    sim.step()
    assert "fence vllm-1" in sim.log
    assert sim.gates["vllm-1"].reason == names.OUT_OF_SYNC


def test_before_the_first_version_the_spec_says_who_serves() -> None:
    sim = joined()
    assert sim.serving("vllm-0")
    assert sim.gates["vllm-0"].status
    sim = joined(beforeFirstVersion="Closed")
    assert not sim.serving("vllm-0")
    assert sim.gates["vllm-0"].reason == names.NO_VERSION_YET
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))


def test_a_partition_takes_no_pod_in_sync_out_of_service() -> None:
    sim = at_version()
    sim.silent["vllm-1"] = sim.now
    sim.run(lambda: sim.now > 130, seconds=5)
    assert sim.gates["vllm-1"].status
    # Known to be behind, it is out.
    sim.publish("step-2", 2)
    sim.run(lambda: sim.committed("step-2"))
    sim.step()
    assert not sim.gates["vllm-1"].status
    # Back again, it is fenced until it has caught up.
    del sim.silent["vllm-1"]
    sim.run(lambda: sim.in_sync("step-2"))
    assert "fence vllm-1" in sim.log


def test_a_member_that_falls_silent_after_the_decision_holds_nobody_up() -> None:
    sim = at_version(deadlines={"commitSeconds": 10})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    sim.silent["vllm-1"] = sim.now
    sim.run(lambda: sim.live("vllm-0") == "step-2")
    assert not sim.committed("step-2")
    sim.run(lambda: sim.committed("step-2"), seconds=1.0)
    sim.step()
    assert not sim.gates["vllm-1"].status
    assert sim.memory.rounds[0].culprit == "vllm-1"
    # The decision still holds for it: what it verified is committed when it is back, not aborted.
    del sim.silent["vllm-1"]
    sim.log.clear()
    sim.step()
    assert "commit vllm-1" in sim.log
    assert "abort vllm-1" not in sim.log
    sim.run(lambda: sim.in_sync("step-2"))


def test_a_dead_lead_does_not_stop_a_decided_commit() -> None:
    sim = at_version()
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    sim.gone.add("trainer-0")
    sim.run(lambda: sim.committed("step-2"))
    assert (sim.live("vllm-0"), sim.live("vllm-1")) == ("step-2", "step-2")


def test_a_silent_lead_delays_the_commit_only_a_moment() -> None:
    sim = at_version()
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    began = sim.now
    sim.silent["trainer-0"] = sim.now
    sim.run(lambda: sim.live("vllm-1") == "step-2")
    assert sim.now - began < sim.settings.lead_wait + 0.5


def test_a_version_that_the_trainer_dropped_is_waited_for_not_invented() -> None:
    sim = at_version()
    trainer = sim.agents["trainer-0"]
    assert trainer.state.trainer is not None
    trainer.update(trainer=trainer.state.trainer.model_copy(update={"published": None}))
    sim.agents["vllm-1"].restart()
    sim.run(lambda: sim.facts.epoch is not None and sim.facts.epoch.number == 2)
    for _ in range(20):
        sim.step(seconds=5)
    assert not sim.serving("vllm-1")
    assert sim.memory.round is None
    sim.publish("step-2", 2)
    sim.run(lambda: sim.in_sync("step-2"))


def test_trainer_pods_that_hold_different_versions_start_nothing() -> None:
    sim = joined(trainers=2)
    trainer = sim.agents["trainer-0"]
    sim.publish("step-1", 1)
    assert trainer.state.trainer is not None
    sim.agents["trainer-1"].update(
        trainer=sim.agents["trainer-1"].state.trainer.model_copy(update={"published": None})  # type: ignore[union-attr]
    )
    for _ in range(5):
        sim.step()
    assert sim.memory.round is None
    sim.publish("step-1", 1)
    sim.run(lambda: sim.in_sync("step-1"))


def test_an_older_version_is_not_brought_again() -> None:
    sim = at_version("step-5")
    sim.publish("step-4", 0)
    for _ in range(5):
        sim.step()
    assert sim.memory.round is None
    assert "prepare vllm-0" not in sim.log


def asks_for(sim: Sim, version: str, **more: Any) -> None:
    trigger = {"type": "OnSpecVersion", "version": version, **more}
    sim.spec = sim.spec.model_validate({"trigger": trigger})


def condition(sim: Sim, kind: str) -> Any:
    decided = sim.decide()
    shown = report(decided.memory, sim.observed(), decided.roster)
    return next(c for c in shown.conditions if c.type == kind)


@pytest.mark.parametrize("sequence", [0, 7])
def test_the_spec_may_go_back_to_an_older_version_only_where_it_says_so(sequence: int) -> None:
    """Whether the trainer still holds it, or has published it again."""
    sim = at_version("step-4", pods=1)
    if sequence == 7:
        sim.publish("step-5", 5)
        sim.run(lambda: sim.in_sync("step-5"))
    served = committed_version(sim.facts)
    back = "step-4" if sequence == 7 else "step-3"
    sim.publish(back, sequence)
    asks_for(sim, back)
    for _ in range(5):
        sim.step()
    assert sim.memory.round is None and sim.live("vllm-0") == served
    for kind, status in (("InSync", "False"), ("Ready", "False"), ("Stalled", "True")):
        said = condition(sim, kind)
        assert (said.status, said.reason) == (status, names.ROLLBACK_NOT_ALLOWED)
        assert back in said.message and "allowRollback" in said.message
    asks_for(sim, back, allowRollback=True)
    sim.run(lambda: sim.in_sync(back))
    assert condition(sim, "InSync").status == "True"
    assert condition(sim, "Stalled").status == "False"


def test_a_version_that_was_never_served_is_no_rollback() -> None:
    sim = at_version("step-4")
    sim.publish("step-5", 5)
    asks_for(sim, "step-5")
    sim.run(lambda: sim.in_sync("step-5"))


def test_the_versions_served_before_are_recorded_with_the_decision_newest_first_and_not_without_end() -> None:
    sim = at_version("step-1", pods=1)
    for number in range(2, 41):
        sim.publish(f"step-{number}", number)
        sim.run(lambda: sim.in_sync(f"step-{number}"))  # noqa: B023
    assert sim.facts.decision is not None
    assert sim.facts.decision.earlier == tuple(f"step-{39 - i}" for i in range(MAX_EARLIER))


# ---- the barrier -------------------------------------------------------------------------------------------


def test_with_a_barrier_all_halt_before_the_decision_and_then_commit() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.committed("step-2"))
    after = sim.log.index("transfer vllm-1")
    assert sim.log[after + 1 :] == [
        "halt vllm-0",
        "halt vllm-1",
        "read trainer-0",
        "read vllm-0",
        "read vllm-1",
        "record decision step-2",
        "commit trainer-0",
        "commit vllm-0",
        "commit vllm-1",
        "record finished step-2",
    ]


def test_a_round_that_changes_nothing_for_those_in_sync_halts_nobody() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    sim.add("vllm-9")
    sim.run(lambda: sim.in_sync("step-1"))
    assert not [entry for entry in sim.log if entry.startswith("halt")]


def test_whoever_does_not_halt_in_time_is_named_and_nothing_is_decided() -> None:
    sim = at_version(flip={"strategy": "Barrier"}, deadlines={"commitSeconds": 10})
    sim.agents["vllm-1"].hold = frozenset({"halt"})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.memory.rounds[0].version == "step-2", seconds=1.0)
    entry = sim.memory.rounds[0]
    assert (entry.outcome, entry.culprit, entry.reason) == ("Aborted", "vllm-1", names.NOT_HALTED)
    sim.step()
    assert {"abort vllm-0", "abort vllm-1"} <= set(sim.log)
    assert sim.live("vllm-0") == "step-1" and sim.serving("vllm-0")
    sim.agents["vllm-1"].release()
    sim.run(lambda: sim.in_sync("step-2"))


def beside(sim: Sim) -> None:
    """vllm-1 serves step-1, and the next epoch is built without it."""
    sim.silent["vllm-1"] = sim.now
    sim.now += 5
    sim.publish("step-2", 2)
    sim.run(lambda: sim.memory.round is not None and sim.memory.round.phase == "halt")


def test_a_pod_beside_the_round_that_cannot_be_reached_holds_back_the_version_and_nobody_else() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    beside(sim)
    for _ in range(20):
        sim.step()
    assert "halt vllm-0" not in sim.log, "nobody stands still for a pod that does not answer"
    assert sim.facts.decision is not None and sim.facts.decision.version == "step-1"
    assert "vllm-1" in condition(sim, "Reconciling").message
    sim.run(lambda: sim.memory.rounds[0].version == "step-2", steps=900, seconds=1.0)
    entry = sim.memory.rounds[0]
    assert (entry.culprit, entry.reason) == ("vllm-1", names.NOT_HALTED)
    assert "delete it if it is dead" in entry.message
    sim.gone.add("vllm-1")
    sim.run(lambda: sim.committed("step-2"))
    assert sim.serving("vllm-0")


def test_a_pod_beside_the_round_is_closed_before_the_others_flip_and_catches_up() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    beside(sim)
    del sim.silent["vllm-1"]
    sim.run(lambda: "record decision step-2" in sim.log)
    assert not sim.serving("vllm-1")
    order = dict.fromkeys(e for e in sim.log if e.startswith(("halt", "record d", "admit")))
    assert list(order) == ["halt vllm-1", "halt vllm-0", "record decision step-2"]
    sim.run(lambda: sim.in_sync("step-2"))


def test_a_pod_that_starts_up_holds_back_nothing_with_a_barrier() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    observed = sim.observed

    def with_newcomer() -> Any:
        seen = observed()
        starting = pod_with(None, "vllm-9", "inference", agent=AgentView(None))
        return replace(seen, pods=(*seen.pods, starting))

    sim.observed = with_newcomer  # type: ignore[method-assign]
    sim.publish("step-2", 2)
    sim.run(lambda: sim.committed("step-2"))


@pytest.mark.parametrize(
    "state, told",
    [(inference_state("vllm-9", starting=True), False), (inference_state("vllm-9", workers=0), True)],
)
def test_a_pod_that_is_out_of_order_is_told_as_an_event_and_one_that_only_starts_is_not(
    state: AgentState, told: bool
) -> None:
    sim = at_version()
    pod = pod_with(state)
    seen = sim.observed()
    events = plan(sim.memory, replace(seen, pods=(*seen.pods, pod))).events
    assert any(event.cause == pod.name for event in events) is told


def test_a_restarted_operator_ends_the_halt_of_an_undecided_round() -> None:
    sim = at_version(flip={"strategy": "Barrier"})
    sim.publish("step-2", 2)
    sim.run(lambda: "halt vllm-0" in sim.log)
    sim.restart_operator()
    sim.log.clear()
    sim.step()
    assert {"abort vllm-0", "abort vllm-1"} <= set(sim.log)
    sim.run(lambda: sim.in_sync("step-2"))


def test_the_flip_policy_of_the_spec_goes_with_prepare() -> None:
    sim = joined(flip={"requests": "Wait", "prefixCache": "Kept"})
    sim.publish("step-1", 1)
    decided = sim.step()
    policies = [send.request.flip for send in decided.sends if isinstance(send.request, Prepare)]
    assert policies == [FlipPolicy(requests="wait", prefix_cache="kept")] * 3


def test_a_suspended_object_finishes_what_runs_and_starts_nothing() -> None:
    sim = joined()
    sim.publish("step-1", 1)
    sim.run(lambda: "transfer vllm-0" in sim.log)
    sim.spec = sim.spec.model_copy(update={"suspend": True})
    sim.run(lambda: sim.in_sync("step-1"))
    sim.publish("step-2", 2)
    sim.add("vllm-9")
    for _ in range(20):
        sim.step(seconds=5)
    assert sim.memory.round is None
    assert sim.facts.epoch is not None
    assert sim.facts.epoch.number == 1


def test_an_epoch_that_fails_names_the_pod_and_is_tried_again_with_backoff() -> None:
    sim = Sim()
    sim.agents["vllm-0"].fail = {"join": Problem(reason="ShapeMismatch", message="q_proj is [8, 4]", rank=2)}
    sim.run(lambda: sim.memory.failure is not None)
    assert sim.memory.failure is not None
    assert (sim.memory.failure.culprit, sim.memory.failure.reason) == ("vllm-1", "ShapeMismatch")
    assert sim.events[-1] == "EpochFailed: pod vllm-1: q_proj is [8, 4] (ShapeMismatch)"
    first = sim.now
    sim.run(lambda: sim.memory.failure is not None and sim.memory.failure.failures == 2)
    assert sim.now - first >= 2
    # vLLM serves meanwhile, and mending the cause is enough.
    assert sim.serving("vllm-0")
    sim.agents["vllm-0"].fail = {}
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    assert sim.memory.failure is None


def test_a_member_that_falls_silent_while_an_epoch_forms_is_named_and_not_waited_for() -> None:
    # Found in the cluster: a pod that was cut off held up all others for the whole join deadline.
    sim = Sim()
    sim.silent["vllm-1"] = sim.now
    sim.run(lambda: sim.memory.epoch is not None and "join vllm-1" in sim.log, seconds=0.5)
    began = sim.silent["vllm-1"]
    sim.run(lambda: sim.memory.failure is not None)
    assert sim.memory.failure is not None
    assert (sim.memory.failure.culprit, sim.memory.failure.reason) == ("vllm-1", names.MEMBER_SILENT)
    assert sim.now - began < 6
    sim.publish("step-1", 1)
    sim.run(lambda: sim.committed("step-1"))
    assert sim.live("vllm-0") == "step-1"
    assert sim.now - began < 10


def test_after_a_failure_no_epoch_is_built_with_a_pod_that_was_not_heard_since() -> None:
    # Found in the cluster: peers notice a pod that is cut off before the operator does; the next epoch had it again.
    sim = joined()
    agent = sim.agents["vllm-0"]
    assert agent.state.epoch is not None
    late = Problem(reason="PeerLate", message="rank 2 is late", rank=2)
    agent.update(epoch=agent.state.epoch.model_copy(update={"phase": EpochPhase.FAILED, "problem": late}))
    sim.silent["vllm-1"] = sim.now
    sim.publish("step-1", 1)
    sim.run(lambda: sim.committed("step-1"))
    assert sim.facts.epoch is not None
    assert sim.facts.epoch.number == 2
    assert [m.pod for m in sim.facts.epoch.members] == ["trainer-0", "vllm-0"]


def test_a_mover_lost_while_idle_means_a_new_epoch() -> None:
    sim = at_version()
    agent = sim.agents["vllm-0"]
    assert agent.state.epoch is not None
    problem = Problem(reason="MoverDied", message="mover of rank 1 was killed", rank=1)
    agent.update(
        epoch=EpochState(
            term=agent.state.epoch.term,
            epoch=agent.state.epoch.epoch,
            phase=EpochPhase.FAILED,
            problem=problem,
        )
    )
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.fact.number == 2)
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.joined)
    assert any("vllm-0" in event and "MoverDied" in event for event in sim.events)


def test_a_leaver_alone_builds_no_epoch_until_there_is_something_to_send() -> None:
    sim = at_version()
    sim.gone.add("vllm-1")
    for _ in range(10):
        sim.step(seconds=5)
    assert sim.facts.epoch is not None
    assert sim.facts.epoch.number == 1
    sim.publish("step-2", 2)
    sim.run(lambda: sim.committed("step-2"))
    assert sim.facts.epoch.number == 2


def test_a_new_training_run_begins_anew_also_with_smaller_sequences() -> None:
    # C30
    sim = at_version("step-9")
    trainer = sim.agents["trainer-0"]
    trainer.restart()
    assert trainer.state.trainer is not None
    trainer.update(trainer=trainer.state.trainer.model_copy(update={"run_id": "run-2", "published": None}))
    sim.run(lambda: sim.memory.epoch is not None and sim.memory.epoch.fact.number == 2)
    sim.publish("step-8", 1)
    sim.run(lambda: sim.in_sync("step-8"))


def test_a_torn_pod_is_out_of_service_until_a_full_round_mends_it() -> None:
    sim = at_version()
    agent = sim.agents["vllm-1"]
    assert agent.state.inference is not None
    agent.update(inference=agent.state.inference.model_copy(update={"torn": True, "live_version": None}))
    sim.step()
    assert "fence vllm-1" in sim.log
    assert sim.gates["vllm-1"].reason == names.TORN
    sim.run(lambda: sim.in_sync("step-1"))


def test_a_pod_that_was_relabelled_away_ends_the_round_it_was_in() -> None:
    sim = joined()
    sim.agents["vllm-1"].hold = frozenset({"transfer"})
    sim.publish("step-1", 1)
    sim.run(lambda: "transfer vllm-1" in sim.log)
    sim.gone.add("vllm-1")
    sim.step()
    assert sim.memory.rounds[0].reason == names.MEMBER_GONE


@pytest.mark.parametrize(
    ("host", "usable"),
    [
        ("0.0.0.0", False),
        ("127.0.0.1", False),
        ("", False),
        ("::", False),
        ("fd00::12", True),
        ("trainer-0", False),
        ("trainer-0.trainer.ns.svc.cluster.local", True),
        ("10.1.2.3", True),
    ],
)
def test_an_address_that_peers_cannot_reach_is_refused(host: str, usable: bool) -> None:
    assert usable_host(host, "10.0.0.1") is usable


def test_a_committed_round_reports_duration_and_rate() -> None:
    sim = at_version()
    entry = sim.memory.last_committed
    assert entry is not None
    assert entry.duration == "0.50s"
    assert entry.rate == f"{2 * 100 / 0.5 / 1e9:.3g} GB/s"
    assert entry.finished_at == WALL.strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_flip_that_fails_leaves_the_pod_closed_and_the_decision_in_force() -> None:
    sim = at_version(deadlines={"commitSeconds": 10})
    sim.publish("step-2", 2)
    sim.run(lambda: sim.facts.decision is not None and sim.facts.decision.version == "step-2")
    agent = sim.agents["vllm-1"]
    assert agent.state.round is not None
    assert agent.state.inference is not None
    agent.update(
        round=agent.state.round.model_copy(
            update={"phase": RoundPhase.FAILED, "problem": Problem(reason="FlipFailed", message="x")}
        ),
        inference=agent.state.inference.model_copy(
            update={"torn": True, "live_version": None, "serving": False}
        ),
    )
    sim.run(lambda: sim.memory.rounds[0].version == "step-2")
    assert sim.live("vllm-0") == "step-2"
    assert not sim.serving("vllm-1")
    assert sim.memory.last_committed is not None
    assert sim.memory.last_committed.culprit == "vllm-1"
    sim.run(lambda: sim.in_sync("step-2"))
