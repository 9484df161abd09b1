"""What the API server itself refuses, and what it stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import ApiServer, ClusterError

from weightsync_operator.api.types import (
    MAX_ROUNDS,
    MAX_SHOWN_MEMBERS,
    Condition,
    DecisionFact,
    EpochFact,
    Facts,
    MemberIdentity,
    MemberReport,
    Report,
    RoundReport,
)


def manifest(spec: dict[str, Any], name: str = "w") -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "weightsync.dev/v1alpha1",
            "kind": "WeightSync",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec,
        }
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"tirgger": {"type": "OnPublish"}}, ['unknown field "spec.tirgger"']),
        ({"trigger": {"type": "OnPublish", "version": "step-1"}}, ["remove version", "OnSpecVersion"]),
        ({"trigger": {"type": "OnSpecVersion"}}, ["trigger.version is required", "OnPublish"]),
        ({"trigger": {"type": "OnSpecVersion", "version": ""}}, ["spec.trigger.version", "step-120"]),
        ({"trigger": {"type": "OnSpecVersion", "version": "a b"}}, ["spec.trigger.version", "step-120"]),
        ({"trigger": {"type": "OnSpecVersion", "version": "a" * 64}}, ["1 to 63 letters"]),
        ({"trigger": {"version": "step-1"}}, ["spec.trigger.type", "Required"]),
        ({"trigger": {"type": "Hourly"}}, ["OnPublish", "OnSpecVersion"]),
        ({"deadlines": {"joinSeconds": 0}}, ["joinSeconds", "1 to 21600", "default of 120"]),
        ({"deadlines": {"transferSeconds": -5}}, ["transferSeconds", "1 to 21600"]),
        ({"deadlines": {"commitSeconds": "30s"}}, ["commitSeconds", "integer"]),
        ({"retry": {"backoffSeconds": 9, "maxBackoffSeconds": 3}}, ["maxBackoffSeconds must not be smaller"]),
        ({"inference": {"minMembers": 0}}, ["minMembers", "leave it out"]),
        ({"trigger": {"type": "OnPublish", "allowRollback": True}}, ["remove it", "OnSpecVersion"]),
        ({"flip": {"requests": "Drain"}}, ["spec.flip.requests", "Keep", "Wait", "Abort"]),
        ({"flip": {"prefixCache": "Keep"}}, ["spec.flip.prefixCache", "Reset", "Kept"]),
        ({"flip": {"strategy": "Canary"}}, ["spec.flip.strategy", "Rolling", "Barrier"]),
        ({"transport": "Nccl"}, ["NcclM2n", "Gloo"]),
        ({"beforeFirstVersion": "Open"}, ["ServeLoadedWeights", "Closed"]),
    ],
)
def test_a_bad_spec_is_refused_with_what_to_write_instead(
    api: ApiServer, spec: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ClusterError) as refused:
        api.kubectl("create", "-f", "-", input=manifest(spec))
    for word in words:
        assert word in str(refused.value)


def test_a_name_that_is_no_label_value_is_refused(api: ApiServer) -> None:
    with pytest.raises(ClusterError, match="at most 63 characters"):
        api.kubectl("create", "-f", "-", input=manifest({}, "w" * 64))


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"trigger": {"type": "OnPublish"}, "suspend": True, "transport": "Auto"},
        {
            "trigger": {"type": "OnSpecVersion", "version": "step-120"},
            "beforeFirstVersion": "Closed",
            "deadlines": {"joinSeconds": 1, "prepareSeconds": 1, "transferSeconds": 1, "commitSeconds": 1},
            "retry": {"backoffSeconds": 3},
            "inference": {"minMembers": 2},
        },
        {
            "trigger": {"type": "OnSpecVersion", "version": "step-4", "allowRollback": True},
            "flip": {"strategy": "Barrier", "requests": "Wait", "prefixCache": "Kept"},
        },
    ],
)
def test_a_good_spec_is_taken(api: ApiServer, spec: dict[str, Any]) -> None:
    api.kubectl("create", "--dry-run=server", "-f", "-", input=manifest(spec))


def full_status() -> dict[str, Any]:
    stamp = "2026-01-02T03:04:05Z"
    member = MemberIdentity(
        pod="p" * 63, uid="u" * 36, boot_id="b" * 32, role="trainer", first_rank=0, ranks=4
    )
    entry = RoundReport(
        number=7,
        version="v" * 63,
        outcome="Aborted",
        finished_at=stamp,
        duration="1.00s",
        rate="2 GB/s",
        culprit="p" * 63,
        reason="Reason",
        message="m" * 1000,
        attempts=50,
    )
    facts = Facts(
        term=3,
        epoch=EpochFact(number=4, members=(member,) * 4),
        decision=DecisionFact(
            epoch=4, round=7, version="v", run_id="r" * 32, sequence=9, members=(member,) * 4, finished=True
        ),
    )
    report = Report(
        observed_generation=2,
        version="v" * 63,
        trainers="2/2",
        inference="2/2",
        last_round=entry,
        conditions=(
            Condition(
                type="Ready",
                status="Unknown",
                reason="R",
                message="m" * 2000,
                observed_generation=2,
                last_transition_time=stamp,
            ),
        ),
        members=(
            MemberReport(
                pod="p" * 63, role="inference", ranks="2-3", version="v", state="InSync", message="m" * 1000
            ),
        )
        * MAX_SHOWN_MEMBERS,
        members_not_shown=900,
        rounds=(entry,) * MAX_ROUNDS,
    )
    return {
        **facts.model_dump(mode="json", by_alias=True),
        **report.model_dump(mode="json", by_alias=True),
    }


def test_every_status_field_is_stored_as_written(api: ApiServer, no_operator: None) -> None:
    # C45
    status = full_status()
    assert all(value not in (None, "", [], {}) for value in status.values()), "a field is not covered"
    api.kubectl("apply", "-f", "-", input=manifest({}, "full"))
    path = "/apis/weightsync.dev/v1alpha1/namespaces/default/weightsyncs/full"
    answer = api.http.patch(
        path + "/status",
        params={"fieldManager": "test", "force": "true", "fieldValidation": "Strict"},
        content=json.dumps({"apiVersion": "weightsync.dev/v1alpha1", "kind": "WeightSync", "status": status}),
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    assert answer.status_code == 200, answer.text
    assert api.http.get(path).json()["status"] == status
    # An object of the largest report stays far from every limit of the API server.
    assert len(json.dumps(status)) < 150_000
    api.http.delete(path)


def test_the_chart_carries_the_generated_crd() -> None:
    root = Path(__file__).resolve().parents[3]
    name = "weightsync.dev_weightsyncs.yaml"
    assert (root / "crds" / name).read_text() == (root / "charts/weightsync/crds" / name).read_text()
