"""Pods and their agents' words -> ranks, or the reason why not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.unit.control.builders import inference_state, pod_with, trainer_state

from weightsync_engine.protocol.messages import Problem
from weightsync_operator import names
from weightsync_operator.core.members import SILENT_AFTER, AgentError, AgentView, Pod, resolve

TRAINER = pod_with(trainer_state())


def remarks(*pods: Pod, now: float = 1000.0) -> dict[str, str]:
    return {remark.pod: remark.reason for remark in resolve(pods, now).remarks}


def test_only_running_pods_whose_agent_answers_are_members() -> None:
    # C13
    def broken(name: str, **fields: Any) -> Pod:
        return pod_with(inference_state(name), **fields)

    pods = [
        TRAINER,
        pod_with(inference_state("a")),
        broken("b", terminating=True),
        broken("c", phase="Failed", ip=""),
        broken("d", phase="Succeeded"),
        broken("e", phase="Pending", ip=""),
        pod_with(inference_state("f")),  # of the previous ReplicaSet
        pod_with(inference_state("g")),  # not Ready in Kubernetes, which plays no part
        pod_with(None, "h"),
        broken("i", ip=""),
    ]
    roster = resolve(pods, 1000.0)
    assert [member.pod for member in roster.inference] == ["a", "f", "g"]
    assert {remark.pod: remark.reason for remark in roster.remarks} == {
        "b": names.TERMINATING,
        "c": names.NOT_RUNNING,
        "d": names.NOT_RUNNING,
        "e": names.NOT_RUNNING,
        "h": names.AGENT_SILENT,
        "i": names.NO_ADDRESS,
    }
    assert {remark.pod for remark in roster.remarks if remark.expected} == {"b", "c", "d"}


def test_a_server_whose_movers_are_still_starting_holds_up_no_epoch() -> None:
    roster = resolve(
        [TRAINER, pod_with(inference_state("a")), pod_with(inference_state("b", starting=True))], 1000.0
    )
    assert [member.pod for member in roster.inference] == ["a"]
    assert [(remark.pod, remark.reason) for remark in roster.remarks] == [("b", names.MOVERS_STARTING)]


def test_ranks_are_gapless_and_independent_of_the_order_of_the_list() -> None:
    pods = [
        pod_with(trainer_state("t-b", ranks=(0, 1), world=4)),
        pod_with(trainer_state("t-a", ranks=(2, 3), world=4)),
        pod_with(inference_state("v-2", workers=1)),
        pod_with(inference_state("v-1", workers=4)),
    ]
    for order in itertools.permutations(pods):
        roster = resolve(order, 1000.0)
        assert roster.violation is None
        taken = [(m.pod, m.identity.first_rank, m.identity.ranks) for m in roster.members]
        assert taken == [("t-b", 0, 2), ("t-a", 2, 2), ("v-1", 4, 4), ("v-2", 8, 1)]
        assert (roster.trainer_ranks, roster.world_size) == (4, 9)


@pytest.mark.parametrize(
    ("trainers", "reason", "words"),
    [
        ([], names.NO_TRAINER, ["trainer"]),
        ([trainer_state("a", ranks=(0,), world=3)], names.TRAINER_INCOMPLETE, ["1 of 3", "1, 2"]),
        ([trainer_state("a"), trainer_state("b")], names.TWO_LEADS, ["a and b"]),
        (
            [trainer_state("a", world=2), trainer_state("b", ranks=(1,), world=2, run_id="other")],
            names.TRAINER_INCONSISTENT,
            ["different training runs", "a", "b"],
        ),
        (
            [trainer_state("a", world=2), trainer_state("b", ranks=(1,), world=3)],
            names.TRAINER_INCONSISTENT,
            ["[2, 3]"],
        ),
        (
            [
                trainer_state("a", ranks=(0,), world=2),
                trainer_state("b", ranks=(1,), world=2),
                trainer_state("c", ranks=(1,), world=2),
            ],
            names.TRAINER_INCONSISTENT,
            ["b and c", "rank 1"],
        ),
        ([trainer_state("a", ranks=(0, 2), world=3)], names.TRAINER_INCONSISTENT, ["a", "gaps"]),
    ],
)
def test_a_trainer_that_is_not_whole_is_described(trainers: list[Any], reason: str, words: list[str]) -> None:
    pods = [*map(pod_with, trainers), pod_with(inference_state("v"))]
    violation = resolve(pods, 1000.0).violation
    assert violation is not None
    assert violation.reason == reason
    for word in words:
        assert word in violation.message


def test_no_inference_pods_and_too_few_are_stated_not_raised() -> None:
    assert resolve([], 0.0).violation is not None
    violation = resolve([TRAINER], 0.0).violation
    assert violation is not None
    assert violation.reason == names.NO_INFERENCE_PODS
    violation = resolve([TRAINER, pod_with(inference_state("v"))], 0.0, min_inference=2).violation
    assert violation is not None
    assert violation.reason == names.TOO_FEW_INFERENCE_PODS
    assert "minMembers asks for 2" in violation.message


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (AgentError("missing", "HTTP 404", 0.0), names.AGENT_MISSING, "--weight-transfer-config"),
        (AgentError("unauthorized", "BadToken", 0.0), names.AGENT_REFUSES_TOKEN, "WEIGHTSYNC_OPERATOR"),
        (
            AgentError("protocol", "", 0.0, 0),
            names.PROTOCOL_MISMATCH,
            "upgrade the weightsync version in the pod",
        ),
        (AgentError("protocol", "", 0.0, 99), names.PROTOCOL_MISMATCH, "upgrade the operator"),
        (AgentError("malformed", "round: bad", 0.0), names.AGENT_MALFORMED, "round: bad"),
        (AgentError("unreachable", "refused", 0.0), names.AGENT_SILENT, "refused"),
    ],
)
def test_each_way_of_not_answering_has_its_remedy(error: AgentError, reason: str, words: str) -> None:
    pod = pod_with(None, "v", "inference", agent=AgentView(error=error))
    (remark,) = resolve([pod], 1000.0).remarks
    assert remark.reason == reason
    assert words in remark.message
    assert "v" in remark.message


def test_an_agent_that_misses_one_call_stays_a_member_for_some_seconds() -> None:
    error = AgentError("timeout", "no answer", since=1000.0)
    pod = pod_with(inference_state("v"), agent=AgentView(inference_state("v"), 0.0, error))
    assert remarks(pod, now=1000.0 + SILENT_AFTER - 0.1) == {}
    assert remarks(pod, now=1000.0 + SILENT_AFTER) == {"v": names.AGENT_SILENT}


def test_another_pod_on_the_same_address_is_not_taken_for_the_member() -> None:
    # C33
    successor = inference_state("v-new").model_copy(update={"pod_uid": "uid-v-new"})
    assert remarks(pod_with(successor, "v-old")) == {"v-old": names.ANOTHER_POD_ANSWERS}
    # With the UID the host name does not matter (host network), without it that is all there is.
    by_uid = inference_state("node-7").model_copy(update={"pod_uid": "uid-v"})
    assert remarks(pod_with(by_uid, "v")) == {}
    assert remarks(pod_with(inference_state("node-7"), "v")) == {"v": names.ANOTHER_POD_ANSWERS}


def test_a_pod_without_the_gate_takes_part_with_a_remark() -> None:
    roster = resolve([TRAINER, pod_with(inference_state("v"), has_gate=False)], 0.0)
    assert [member.pod for member in roster.inference] == ["v"]
    assert roster.violation is None
    assert [(remark.reason, remark.takes_part) for remark in roster.remarks] == [(names.GATE_MISSING, True)]
    assert "readinessGates" in roster.remarks[0].message


def test_labels_and_agents_that_do_not_fit_are_named() -> None:
    assert remarks(pod_with(inference_state("v"), role="server")) == {"v": names.ROLE_UNKNOWN}
    assert remarks(pod_with(inference_state("v"), role="trainer")) == {"v": names.ROLE_MISMATCH}
    problem = Problem(reason="NoBackend", message="vLLM runs without the backend")
    state = inference_state("v").model_copy(update={"problem": problem})
    assert remarks(pod_with(state)) == {"v": "NoBackend"}
    assert remarks(pod_with(inference_state("v", workers=0))) == {"v": names.AGENT_MALFORMED}
    assert remarks(pod_with(trainer_state("t", ranks=()))) == {"t": names.AGENT_MALFORMED}
