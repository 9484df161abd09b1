"""`Publisher` on real ranks: FSDP2 over gloo, two processes and three, a tiny transformers model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.agent.tokens import Cluster
from tests.integration.trainer.ranks import Ranks

pytestmark = pytest.mark.timeout(
    600
)  # importing torch and transformers in every rank takes a minute at times


def until(true: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (said := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return said


def alive(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def two(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("two"), cluster.environment()) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(3, tmp_path_factory.mktemp("three"), cluster.environment()) as ranks:
        yield ranks


def same(said: list[Any]) -> Any:
    """What all ranks said alike, apart from times."""
    for other in said[1:]:
        assert {k: v.get("error") for k, v in said[0].items()} == {
            k: v.get("error") for k, v in other.items()
        }
    return said[0]


# ---- what travels ------------------------------------------------------------------------------------------


def test_uneven_shards_and_empty_tails_are_described_from_the_global_shape(three: Ranks) -> None:
    said = three.run("sources")
    first = said[0]
    for other in said[1:]:
        assert {k: v for k, v in other.items() if k != "local"} == {
            k: v for k, v in first.items() if k != "local"
        }
    locals_ = [s["local"] for s in said]
    assert [x["model.embed_tokens.weight"] for x in locals_] == [[334, 65], [334, 65], [332, 65]]
    assert [x["model.norm.weight"] for x in locals_] == [[22], [22], [21]]
    assert [x["model.layers.0.self_attn.q_norm.weight"] for x in locals_] == [[11], [11], [10]]
    assert first["shapes"]["model.norm.weight"] == [65]
    assert first["placements"]["model.norm.weight"] == ["Shard(dim=0)"]
    assert first["ranks"]["model.norm.weight"] == [0, 1, 2]


def test_a_tied_head_is_sent_once_under_the_first_name(three: Ranks) -> None:
    said = three.run("sources")[0]
    assert said["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in said["names"]


def test_persistent_buffers_travel_as_they_are_and_others_do_not(three: Ranks) -> None:
    said = three.run("sources")[0]
    assert said["dtypes"]["steps"] == "int64" and said["placements"]["steps"] == ["Replicate()"]
    assert not [n for n in said["names"] if "scratch" in n or "inv_freq" in n]


def test_the_wire_dtype_is_what_fsdp_computes_with(three: Ranks) -> None:
    said = three.run("sources")[0]
    assert {t for n, t in said["dtypes"].items() if n != "steps"} == {"bfloat16"}


def test_a_root_that_a_forward_pass_left_unsharded_is_resharded(two: Ranks) -> None:
    for said in two.run("sources_after_forward"):
        assert said["plain_before"]
        assert said["plain_after"] == []


# ---- snapshots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", ["two", "three"])
def test_the_snapshot_is_the_published_weights_in_the_wire_dtype_whatever_training_does(
    world: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(world)
    for said in ranks.run("snapshots"):
        assert [r["equal"] for r in said] == [True, True]
        assert [r["stamp"] for r in said] == [["step-1", 1], ["step-2", 2]]
        assert all(r["tensors"] > 20 for r in said)
    up = ranks.read()
    port, run_dir = up[0]["port"], Path(up[0]["run_dir"])
    assert httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200
    assert [u["port"] for u in up[1:]] == [None] * (ranks.world - 1)
    assert run_dir.exists()
    ranks.say()
    until(lambda: not run_dir.exists())  # closed: agent and movers have left


@pytest.mark.parametrize("world", ["two", "three"])
def test_stacked_experts_arrive_in_the_snapshot_as_the_checkpoint_has_them(
    world: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(world)
    said = ranks.run("stacked")
    for family in said[0]:
        for rank in said:
            assert (rank[family]["wrong"], rank[family]["missing"]) == ([], []), family
        if not said[0][family]["replicated"]:
            assert sum(rank[family]["elements"] for rank in said) == said[0][family]["of"], family
    moe = said[0]["qwen3-moe"]
    assert moe["tensors"] < moe["held"]  # one copy for the whole shard of a stacked tensor


def test_stages_with_names_of_their_own_agree_on_one_list(three: Ranks) -> None:
    said = three.run("stages")
    assert said[0]["sources"] == said[1]["sources"] == said[2]["sources"]
    assert all(s["across"] for s in said)  # a transposed view is sent as what it shows
    sources = {name: (ranks, tensor) for name, ranks, tensor in said[0]["sources"]}
    assert sources["all"] == ([0, 1, 2], "all") and sources["layer.3"] == ([1], "stage.1:layer.2")
    assert [s["tensors"] for s in said] == [["all", f"stage.{r}:layer.{2 * r}"] for r in range(3)]


# ---- what is refused, on all ranks at once -----------------------------------------------------------------


@pytest.mark.parametrize("world", ["two", "three"])
def test_every_mistake_with_publish_is_the_same_error_on_all_ranks_at_once(
    world: str, request: pytest.FixtureRequest
) -> None:
    said = request.getfixturevalue(world).run("errors")
    errors = {k: v["error"] for k, v in same(said).items()}
    assert "published before" in errors["used"]
    for case in ("empty", "invalid", "not a string"):
        assert "is not allowed: use 1 to 63 letters" in errors[case]
    assert "on_busy" in errors["policy"]
    assert "different values of version, by rank: ['step-of-0', 'step-of-1'" in errors["different versions"]
    assert errors["used on one rank"].startswith("trainer rank 0: version 'step-1' was published before")
    assert (
        errors["new on one rank"].startswith("trainer rank 1: ") and "norm.extra" in errors["new on one rank"]
    )
    assert "rank 1: parameter 'model.norm.weight'" in errors["shape on one rank"]
    assert "float64" in errors["dtype on one rank"]
    assert errors["mended"] == ""
    assert errors["closed on one rank"] == "trainer rank 0: the publisher is closed"
    assert errors["closed"] == "the publisher is closed"
    assert max(v["seconds"] for rank in said for v in rank.values()) < 10


def test_what_cannot_be_published_is_refused_when_the_publisher_is_made(two: Ranks) -> None:
    errors = {k: v["error"] for k, v in same(two.run("init_errors")).items()}
    assert errors["no parameters"] == "there are no parameters to publish"
    assert "'a' is a int, not a tensor" in errors["no tensor"]
    assert "pass .items()" in errors["a dict"]
    assert errors["meta on one rank"].startswith("trainer rank 1: parameter 'a' is on the meta device")
    assert "shape is [2] on rank 0 and [3] on rank 1" in errors["shape differs"]
    assert "other values on rank 0 than on rank 1" in errors["values differ"]
    assert "complex64 cannot travel" in errors["complex"]
    assert "cannot travel as torch.int64" in errors["wire dtype"]
    assert "two different tensors are named 'a'" in errors["two of one name"]
    assert "port 70000" in errors["port"]


# ---- what becomes of a version -----------------------------------------------------------------------------


def test_a_version_that_travels_is_neither_overwritten_nor_waited_for_without_end(two: Ranks) -> None:
    said = two.run("busy")
    for rank in said:
        assert rank["replaced"][0] == "Superseded" and rank["replaced"][1]["type"] == "Superseded"
        state, error, stamp = rank["skipped"]
        assert (state, error["type"], stamp) == ("Superseded", "Superseded", ["v2", 2])
        assert "'v2' was still travelling" in error["error"]
        assert "'v2' was still travelling after 1 s" in rank["wait in vain"]["error"]
        assert (
            rank["given up"]["type"] == "RoundFailed"
            and "pod vllm-0 lacks model.x" in rank["given up"]["error"]
        )
        assert rank["committed"][0]["error"] == "" and rank["committed"][1] == "Committed"
        assert rank["closed"]["type"] == "RoundFailed" and "PublisherClosed" in rank["closed"]["error"]
    assert said[0]["travelling"][0] == "Travelling"
    assert said[0]["failed once"]["type"] == "PublishTimeout"
    assert "the mover of rank 2 (pod x) is gone" in said[0]["failed once"]["error"]


def test_a_rank_that_does_not_come_is_named_and_nobody_waits_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    with Ranks(2, tmp_path, cluster.environment()) as ranks:
        ranks.say("absent")
        first, later = ranks.ranks[0].read()
        assert "not every trainer rank came to publish('v1') within 2 s" in first["error"]
        assert "1" in first["error"].split("(", 2)[-1]  # the missing rank, in torch's own words
        assert first["seconds"] < 30
        assert later["error"] == first["error"] and later["seconds"] < 1


# ---- ends --------------------------------------------------------------------------------------------------


def test_a_script_that_just_ends_leaves_no_process_and_no_file(cluster: Cluster, tmp_path: Path) -> None:
    with Ranks(2, tmp_path, cluster.environment()) as ranks:
        up = ranks.run("leave_without_close")
        assert ranks.join() == [0, 0]
        pids = [u["mover"] for u in up] + [up[0]["agent"]]
        until(lambda: not any(alive(pid) for pid in pids))
        until(lambda: not Path(up[0]["run_dir"]).exists())
        assert not list(tmp_path.glob("weightsync-*"))


def test_a_killed_training_process_takes_agent_and_movers_with_it(cluster: Cluster, tmp_path: Path) -> None:
    with Ranks(1, tmp_path, cluster.environment()) as ranks:
        (up,) = ranks.run("serve")
        assert alive(up["mover"]) and alive(up["agent"])
        os.kill(ranks.ranks[0].process.pid, signal.SIGKILL)
        until(lambda: not alive(up["mover"]) and not alive(up["agent"]))
        until(lambda: not Path(up["run_dir"]).exists())
