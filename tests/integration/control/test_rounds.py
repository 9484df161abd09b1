"""Rounds, by the real operator against a real API server."""

from __future__ import annotations

from tests.integration.control.conftest import Operator, World
from tests.integration.control.fake_agents import FakeAgent, eventually

from weightsync_engine.protocol.messages import Problem, RoundPhase
from weightsync_operator.names import CONDITIONS


def small_world(world: World, **spec: object) -> tuple[FakeAgent, FakeAgent, FakeAgent]:
    """A trainer, two vLLM pods, an object."""
    trainer, one, two = world.fleet.trainer(), world.fleet.inference(), world.fleet.inference(workers=2)
    world.pod("trainer-0", trainer)
    world.pod("vllm-a", one)
    world.pod("vllm-b", two)
    world.object(**spec)
    return trainer, one, two


def live(agent: FakeAgent) -> str | None:
    assert agent.state.inference is not None
    return agent.state.inference.live_version


def serving(agent: FakeAgent) -> bool:
    assert agent.state.inference is not None
    return agent.state.inference.serving


def test_the_first_visit_writes_all_conditions(world: World, operator: Operator) -> None:
    world.object()
    world.wait_condition("Ready", "False", "NoTrainer")
    conditions = world.status()["conditions"]
    assert [item["type"] for item in conditions] == list(CONDITIONS)
    assert {item["observedGeneration"] for item in conditions} == {1}
    assert world.condition("MembersResolved")["reason"] == "NoTrainer"
    # A trainer alone is the next thing to wait for.
    world.pod("trainer-0", world.fleet.trainer())
    world.wait_condition("Ready", "False", "NoInferencePods")


def test_every_published_version_reaches_all_pods(world: World, operator: Operator) -> None:
    # C40
    trainer, one, two = small_world(world)
    world.wait_condition("Ready", "True", "WaitingForFirstVersion")
    eventually(lambda: world.gate("vllm-a").get("status") == "True")
    for number, version in enumerate(("step-1", "step-2"), start=1):
        world.fleet.publish(version, number, trainer)
        world.wait_version(version)
        for agent in (one, two):
            assert live(agent) == version
            assert serving(agent)
    world.wait_condition("Ready", "True", "InSync")
    joined = [request for verb, request in two.requests if verb == "join"][-1]
    assert (joined.first_rank, joined.world_size, joined.trainer_ranks) == (2, 4, 1)  # type: ignore[attr-defined]
    # One epoch for both versions, and no commit that was not asked for.
    assert world.status()["epoch"]["number"] == 1
    assert one.verbs("join", "prepare", "transfer", "commit") == [
        "join",
        *["prepare", "transfer", "commit"] * 2,
    ]
    table = world.api.kubectl("get", "wsync", "-n", world.namespace)
    assert table.split("\n")[1].split()[:7] == ["w", "True", "step-2", "1/1", "2/2", "0.50s", "8"]
    assert "GB/s" in table


def test_a_version_is_brought_when_the_spec_asks_for_it(world: World, operator: Operator) -> None:
    trainer, one, _ = small_world(world, trigger={"type": "OnSpecVersion", "version": "step-2"})
    world.fleet.publish("step-1", 1, trainer)
    world.wait_condition("RendezvousEstablished", "True")
    world.wait_condition("InSync", "False", "NoVersionYet")
    assert "step-2 is not what the trainer holds (step-1)" in world.condition("InSync")["message"]
    world.fleet.publish("step-2", 2, trainer)
    world.wait_version("step-2")
    assert live(one) == "step-2"
    world.fleet.publish("step-3", 3, trainer)
    world.object(trigger={"type": "OnSpecVersion", "version": "step-3"})
    world.wait_version("step-3")
    # Back to a version that was served before, which the trainer publishes again: only where the spec allows it.
    world.fleet.publish("step-2", 4, trainer)
    world.object(trigger={"type": "OnSpecVersion", "version": "step-2"})
    for kind, status in (("InSync", "False"), ("Ready", "False"), ("Stalled", "True")):
        condition = world.wait_condition(kind, status, "RollbackNotAllowed")
        assert "allowRollback" in condition["message"]
    assert live(one) == "step-3"
    world.object(trigger={"type": "OnSpecVersion", "version": "step-2", "allowRollback": True})
    world.wait_version("step-2")
    assert live(one) == "step-2"
    world.wait_condition("Ready", "True", "InSync")


def test_with_a_barrier_every_pod_halts_before_the_decision_is_recorded(
    world: World, operator: Operator
) -> None:
    trainer, one, two = small_world(world, flip={"strategy": "Barrier", "requests": "Wait"})
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    for agent in (one, two):
        assert agent.verbs("prepare", "halt", "commit") == ["prepare", "halt", "commit"]
        (prepare,) = [request for verb, request in agent.requests if verb == "prepare"]
        assert prepare.flip.requests == "wait"  # type: ignore[attr-defined]
    assert "halt" not in trainer.verbs()
    # Nothing is decided past a pod that does not halt, and the object names it.
    two.script.hold_halt = True
    world.fleet.publish("step-2", 2, trainer)
    eventually(lambda: "halt" in two.verbs()[-1:])
    eventually(lambda: "vllm-b" in world.condition("Reconciling").get("message", ""))
    assert (live(one), world.status()["decision"]["version"]) == ("step-1", "step-1")
    two.script.hold_halt = False
    world.wait_version("step-2")


def test_a_failed_transfer_names_the_pod_and_the_old_version_stays(world: World, operator: Operator) -> None:
    trainer, one, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    problem = Problem(reason="PeerSilent", message="rank 3 made no progress for 10 s", rank=3)
    two.script.transfer_problem = problem
    world.fleet.publish("step-2", 2, trainer)
    condition = world.wait_condition("Ready", "False", "RoundFailed")
    assert "vllm-b" in condition["message"]
    assert "no progress" in condition["message"]
    assert (live(one), serving(one)) == ("step-1", True)
    world.wait_condition("Stalled", "True", "PeerSilent")  # after three attempts
    text = world.api.kubectl("describe", "wsync", "w", "-n", world.namespace)
    for words in ("vllm-b", "no progress", "PeerSilent", "RoundFailed", "Culprit"):
        assert words in text
    failed = [event for event in world.events() if event["reason"] == "RoundFailed"]
    assert len(failed) == 1  # three attempts: the others are counted when a minute has passed
    rounds = world.status()["rounds"]
    assert rounds[0]["attempts"] >= 3
    assert [(entry["version"], entry["outcome"]) for entry in rounds] == [
        ("step-2", "Aborted"),
        ("step-1", "Committed"),
    ]
    assert world.gate("vllm-a")["status"] == "True"
    # Mending the cause is enough.
    two.script.transfer_problem = None
    world.wait_version("step-2")
    world.wait_condition("Ready", "True", "InSync")


def test_a_recorded_decision_is_rolled_forward_by_the_next_operator(world: World, operator: Operator) -> None:
    # C41
    trainer, one, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    one.script.hold_commit = two.script.hold_commit = True
    world.fleet.publish("step-2", 2, trainer)
    eventually(lambda: world.status()["decision"]["version"] == "step-2" and "commit" in two.verbs()[-1:])
    operator.kill()
    before = world.status()
    assert not before["decision"].get("finished")
    assert (live(one), live(two)) == ("step-1", "step-1")
    one.script.hold_commit = two.script.hold_commit = False
    operator.start()
    world.wait_version("step-2")
    assert (live(one), live(two)) == ("step-2", "step-2")
    after = world.status()
    assert after["term"] == before["term"] + 1
    assert after["decision"]["round"] == before["decision"]["round"]
    assert "abort" not in one.verbs() + two.verbs()
    assert any(event["reason"] == "RolledForward" for event in world.events())


def test_a_round_without_a_decision_is_aborted_and_repeated_by_the_next_operator(
    world: World, operator: Operator
) -> None:
    trainer, one, two = small_world(world)
    two.script.hold_transfer = True
    world.fleet.publish("step-1", 1, trainer)
    eventually(lambda: two.state.round is not None and two.state.round.phase is RoundPhase.TRANSFERRING)
    operator.kill()
    assert "decision" not in world.status()
    first = two.state.round
    operator.start()
    # The old round is told to end, or a new epoch has taken its place.
    eventually(lambda: two.state.round != first)
    two.script.hold_transfer = False
    world.wait_version("step-1")
    assert (live(one), live(two)) == ("step-1", "step-1")
    assert "abort" in two.verbs()
    first_commit = two.verbs().index("commit")
    assert "abort" in two.verbs()[:first_commit]


def test_a_new_or_restarted_pod_is_kept_closed_until_it_has_the_version(
    world: World, operator: Operator
) -> None:
    trainer, one, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    world.wait_condition("Ready", "True", "InSync")
    late = world.fleet.inference()
    late.script.hold_transfer = True
    world.pod("vllm-c", late)
    eventually(lambda: late.state.round is not None and late.state.round.phase is RoundPhase.TRANSFERRING)
    assert not serving(late)
    assert world.gate("vllm-c")["status"] == "False"
    assert "step-1" in world.gate("vllm-c")["message"]
    # The others serve on meanwhile.
    assert serving(one)
    assert world.gate("vllm-a")["status"] == "True"
    late.script.hold_transfer = False
    world.fleet.change(late.finish_transfer)
    eventually(lambda: serving(late) and world.gate("vllm-c")["status"] == "True")
    assert live(late) == "step-1"
    # In place, while nobody watches the pod: the gate of the former process must not speak for the next one.
    world.fleet.restart(two)
    eventually(lambda: live(two) == "step-1" and serving(two), within=30)
    # Once the trainer has dropped the version, a newcomer waits for the next one, and the object says so.
    world.wait_condition("Ready", "True", "InSync")
    world.fleet.change(
        lambda: trainer.update(trainer=trainer.state.trainer.model_copy(update={"published": None}))  # type: ignore[union-attr]
    )
    world.fleet.restart(one)
    world.wait_condition("InSync", "False", "VersionUnavailable")
    assert "vllm-a" in world.condition("InSync")["message"]
    assert world.gate("vllm-a")["status"] == "False"
    world.fleet.publish("step-2", 2, trainer)
    world.wait_version("step-2", within=30)


def test_an_idle_object_causes_no_writes(world: World, operator: Operator) -> None:
    trainer, one, _ = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    world.wait_condition("Ready", "True", "InSync")
    eventually(lambda: world.gate("vllm-a")["status"] == "True" and world.gate("vllm-b")["status"] == "True")
    eventually(lambda: world.condition("Reconciling")["reason"] == "Idle")

    def writes() -> dict[str, float]:
        """All writes to anything but Leases, as the API server counts them."""
        out = {}
        for line in world.api.http.get("/metrics").text.splitlines():
            if line.startswith("apiserver_request_total{") and 'resource="leases"' not in line:
                labels, _, number = line.rpartition(" ")
                if any(f'verb="{verb}"' in labels for verb in ("PATCH", "APPLY", "PUT", "POST", "DELETE")):
                    out[labels] = float(number)
        return out

    before, polls, stored = writes(), one.polls, world.get()
    eventually(lambda: one.polls >= polls + 3, within=40)
    assert world.get() == stored
    assert {key: value for key, value in writes().items() if before.get(key) != value} == {}


def test_deletion_ends_also_when_all_pods_are_dead(world: World, operator: Operator) -> None:
    # C41
    trainer, one, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    for agent in (trainer, one):
        world.fleet.run(agent.stop())
    world.api.kubectl("delete", "wsync", "w", "-n", world.namespace, "--wait=false")
    eventually(lambda: not world.get(), within=15)
    # Who still lives is told, and serves on as it is.
    assert two.verbs()[-1] == "leave"
    assert (live(two), serving(two)) == ("step-1", True)
    assert world.gate("vllm-b")["status"] == "True"


def test_an_object_without_its_finalizer_is_forgotten_as_well(world: World, operator: Operator) -> None:
    trainer, one, _ = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    world.wait_condition("Reconciling", "False", "Idle")
    world.api.kubectl("delete", "wsync", "w", "-n", world.namespace, "--wait=false")
    world.strip()
    eventually(lambda: not world.get())
    eventually(lambda: one.verbs()[-1] == "leave")


def test_a_restart_of_the_api_server_costs_only_time(world: World, operator: Operator) -> None:
    # C42
    trainer, one, two = small_world(world)
    world.fleet.publish("step-1", 1, trainer)
    world.wait_version("step-1")
    world.wait_condition("Ready", "True", "InSync")
    world.api.stop_server()
    world.fleet.publish("step-2", 2, trainer)
    # It gets as far as it may without a record: verified, never committed.
    eventually(lambda: two.state.round is not None and two.state.round.phase is RoundPhase.VERIFIED)
    assert live(one) == "step-1"
    world.api.start_server()
    world.wait_version("step-2", within=40)
    assert (live(one), live(two)) == ("step-2", "step-2")
