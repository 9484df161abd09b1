"""What the ranks' own words become: names, layouts, conflicts. No processes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from weightsync_engine.layout.tensors import Mesh, Replicate, Shard, SourceParameter, StridedShard
from weightsync_engine.trainer.handle import PublishError
from weightsync_engine.trainer.merge import merge
from weightsync_engine.trainer.sources import Sources


def said(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "shape": [8, 4], "dtype": "bfloat16", "mesh": None, "placements": None,
        "parameter": True, "computed": "bfloat16", "kept": False, **changes,
    }  # fmt: skip


def test_plain_tensors_are_replicated_on_the_ranks_that_hold_them() -> None:
    merged = merge([[said("a"), said("b")], [said("a")], [said("a"), said("b")]])
    assert merged[0] == SourceParameter("a", (8, 4), "bfloat16", Mesh((3,), (0, 1, 2)), (Replicate(),))
    assert merged[1].mesh == Mesh((2,), (0, 2))  # a pipeline stage of its own


def test_meshes_of_several_dimensions_and_strided_shards_are_kept() -> None:
    mesh = {"shape": [2, 2], "ranks": [0, 1, 2, 3]}
    entry = said("a", mesh=mesh, placements=[["strided", 0, 2], ["shard", 0]])
    (source,) = merge([[entry]] * 4)
    assert source.mesh == Mesh((2, 2), (0, 1, 2, 3))
    assert source.placements == (StridedShard(0, 2), Shard(0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [9, 4]}, "shape is [8, 4] on rank 0 and [9, 4] on rank 1"),
        ({"dtype": "float32"}, "dtype is bfloat16 on rank 0 and float32 on rank 1"),
        ({"mesh": {"shape": [2], "ranks": [0, 1]}, "placements": [["shard", 0]]}, "mesh is None on rank 0"),
    ],
)
def test_ranks_that_disagree_are_named_with_the_parameter(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PublishError) as error:
        merge([[said("a")], [said("a", **change)]])
    assert "'a'" in str(error.value) and words in str(error.value)


def test_a_dtensor_that_a_rank_of_its_mesh_lacks_is_refused() -> None:
    entry = said("a", mesh={"shape": [2], "ranks": [0, 1]}, placements=[["shard", 0]])
    with pytest.raises(PublishError, match="held by"):
        merge([[entry], []])


def test_shards_that_are_no_boxes_are_refused_where_they_are_published() -> None:
    """As transformers cuts a packed gate_up_proj for tensor parallelism: a part of each half on every rank."""
    entry = said("a", mesh={"shape": [2], "ranks": [0, 1]}, placements=[["strided", 0, 2]])
    with pytest.raises(PublishError, match=r"'a'.*publish its parts as DTensors of their own"):
        merge([[entry], [entry]])


def test_no_parameters_at_all_is_an_error_and_not_an_empty_plan() -> None:
    with pytest.raises(PublishError, match="no parameters"):
        merge([[], []])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def test_tied_weights_are_found_by_storage_and_sent_once() -> None:
    sources = Sources(Tied())
    names = [h.name for h in sources.held()]
    assert sources.aliases == {"head.weight": "embed.weight"}
    assert "head.weight" not in names and "norm.running_mean" in names


def test_wrapper_names_do_not_reach_the_checkpoint() -> None:
    model = nn.Sequential()
    model.add_module("_orig_mod", nn.Linear(2, 2))
    assert [h.name for h in Sources(model).held()] == ["weight", "bias"]


def test_names_are_mapped_and_left_out() -> None:
    model = nn.Linear(2, 2)
    assert [h.name for h in Sources(model, names={"weight": "w"}).held()] == ["w", "bias"]
    assert [h.name for h in Sources(model, names=lambda n: None if n == "bias" else n).held()] == ["weight"]


def test_a_mapping_that_makes_two_tensors_one_name_is_refused() -> None:
    with pytest.raises(PublishError, match="two different tensors are named 'x'"):
        Sources(nn.Linear(2, 2), names=lambda n: "x").held()


def test_the_wire_dtype_can_be_chosen_for_all_or_by_name() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("steps", torch.arange(2))
    wires = {h.name: h.wire for h in Sources(model, dtype=torch.bfloat16).held()}
    assert wires == {"weight": torch.bfloat16, "bias": torch.bfloat16, "steps": torch.int64}
    wires = {h.name: h.wire for h in Sources(model, dtype={"weight": torch.float16}).held()}
    assert (wires["weight"], wires["bias"]) == (torch.float16, torch.float32)


def test_freed_storage_is_refused() -> None:
    weight = torch.ones(4, 4)
    weight.untyped_storage().resize_(0)
    with pytest.raises(PublishError, match="'a' has no storage"):
        Sources([("a", weight)]).held()


def test_the_protocol_and_the_package_itself_import_no_torch() -> None:
    script = (
        "import sys, weightsync_engine, weightsync_engine.protocol.session\n"
        "assert 'torch' not in sys.modules\n"
        "from weightsync_engine import Publisher\n"
        "assert Publisher.__name__ == 'Publisher' and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_several_ranks_without_torch_distributed_are_told_what_to_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weightsync_engine import Publisher

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PublishError, match="init_process_group"):
        Publisher(nn.Linear(2, 2))


def test_nothing_is_read_anew_while_every_tensor_lies_where_it_lay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sources = Sources(model)
    first = sources.held()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert sources.held() is first


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[0].weight, "data", torch.ones(4, 4)),
        lambda m: setattr(m[0].weight, "data", torch.ones(8, 4)),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.view(8, 2)),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.T),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.data)),
        lambda m: setattr(m[1], "weight", m[0].weight),
    ],
    ids=["moved", "grown", "seen otherwise", "turned", "another object", "tied"],
)
def test_what_moved_or_changed_is_read_anew(change: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sources = Sources(model)
    first = sources.held()
    change(model)
    now = sources.held()
    assert now is not first
    assert [h.local.data_ptr() for h in now] == [h.local.data_ptr() for h in Sources(model).held()]
    assert [h.local.shape for h in now] == [h.local.shape for h in Sources(model).held()]
