"""What the report says is what the plan does."""

import json

from weightsync_engine.cli.report import Server, report, size, text
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import (
    Expected,
    Mesh,
    Piece,
    Replicate,
    Shard,
    SlabTensor,
    SourceParameter,
    WorkerManifest,
)
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker


def planned(fallback=None):
    sources = [
        SourceParameter("w", (8, 4), "float32", Mesh((2,), (0, 1)), (Shard(0),)),
        SourceParameter("v", (4,), "float32", Mesh((2,), (0, 1)), (Replicate(),)),
    ]
    shapes = {s.name: s.shape for s in sources}
    manifest = WorkerManifest(
        {n: Expected(s, "float32") for n, s in shapes.items()},
        tuple(Piece(n, Box.whole(s), n, (0,) * len(s)) for n, s in shapes.items()),
        {n: SlabTensor(0, s, "float32") for n, s in shapes.items()},
        {},
        fallback=fallback or {},
    )
    plan = compile_plan(sources, [Worker(2 + w, "s", manifest) for w in range(3)], 2)
    return plan, sources


def test_bytes_of_ranks_links_and_memory_add_up():
    plan, sources = planned()
    found = report(plan, sources, "FSDP 2", [Server("TP 1", 3, 1, (144,))], {}, 0)
    assert found["bytes"] == {
        "model": 144, "direct_share": 1.0, "loader_share": 0.0, "received_by_all": 3 * 144,
    }  # fmt: skip
    assert sum(r["bytes_sent"] for r in found["by_rank"]) == 3 * 144
    assert [r["bytes_received"] for r in found["by_rank"]] == [0, 0, 144, 144, 144]
    assert found["trainer_ranks"]["snapshot_bytes"]["most"] == 64 + 16
    assert found["workers"]["shadow_bytes"] == {"count": 3, "least": 144, "mean": 144, "most": 144}
    assert found["digest"] == plan.digest
    json.dumps(found)


def test_what_is_not_direct_is_told_with_its_reason_and_its_share():
    plan, sources = planned()
    reasons = {f"experts.{i}": "its loader transforms values" for i in range(3)}
    found = report(plan, sources, "FSDP 2", [Server("TP 1", 3, 1, (144,))], reasons, 144)
    assert found["bytes"]["direct_share"] == 0.5 and found["parameters"]["direct"] == 2
    told = text(found)
    assert "experts.0 and 2 more: its loader transforms values" in told and "50.0%" in told


def test_what_vllms_loader_takes_is_counted_apart_from_what_is_direct_or_refused():
    plan, sources = planned({"v": "its loader permutes rows"})
    found = report(plan, sources, "FSDP 2", [Server("TP 1", 3, 1, (144,))], {"u": "it is empty"}, 144)
    assert found["parameters"]["by_loader"] == {"v": "its loader permutes rows"}
    assert found["parameters"]["refused"] == {"u": "it is empty"}
    assert found["parameters"]["direct"] == 1
    assert found["bytes"]["direct_share"] == 128 / 288 and found["bytes"]["loader_share"] == 16 / 288
    told = text(found)
    assert "1 by vLLM's loader (5.6%), 1 refused" in told
    assert "v: its loader permutes rows" in told and "u: it is empty" in told


def test_sizes_are_readable():
    assert [size(n) for n in (0, 999, 1000, 2.05e9, 1.894e12, 4e15)] == [
        "0 B", "999 B", "1 kB", "2.05 GB", "1.89 TB", "4000 TB",
    ]  # fmt: skip
