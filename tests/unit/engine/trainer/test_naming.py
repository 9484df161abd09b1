"""What `names` may answer, and what adapters do to names. No transformers, no processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightsync_engine.layout.tensors import Mesh, Replicate, SourceParameter, Within
from weightsync_engine.trainer.handle import PublishError
from weightsync_engine.trainer.merge import merge, pack, unpack
from weightsync_engine.trainer.naming import Part, checked
from weightsync_engine.trainer.sources import Sources, fingerprint

# ---- regions -----------------------------------------------------------------------------------------------


def test_a_function_may_cut_a_tensor_into_checkpoint_parameters() -> None:
    qkv = nn.Linear(4, 8, bias=False)
    cut = [("q", (0, 0), (4, 4)), ("k", (4, 0), (2, 4)), ("v", (6, 0), (2, 4))]
    (held,) = Sources(qkv, names=lambda n: cut).held()
    assert (held.name, held.parts) == ("weight:q", tuple(Part(*c) for c in cut))
    q, k, v = merge([[held.describe()]] * 2)
    assert k == SourceParameter(
        "k", (2, 4), "float32", Mesh((2,), (0, 1)), (Replicate(),), Within("weight:q", (8, 4), (4, 0))
    )
    assert (q.tensor, v.tensor) == ("weight:q", "weight:q")


def test_padding_stays_behind() -> None:
    (held,) = Sources([("embed", torch.zeros(10, 4))], names={"embed": [("embed", (0, 0), (7, 4))]}).held()
    (source,) = merge([[held.describe()]])
    assert source.shape == (7, 4) and source.tensor_shape == (10, 4)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("", "expected a checkpoint name, None, or a list"),
        (3, "expected a checkpoint name, None, or a list"),
        ([], "expected a checkpoint name, None, or a list"),
        ([("a", (0, 0))], "expected (checkpoint name, at, shape)"),
        ([("a", (0, "x"), (1, 1))], "expected (checkpoint name, at, shape)"),
        ([(None, (0, 0), (1, 1))], "a region called None"),
        ([("a", (0,), (4,))], "not inside the tensor's shape (8, 4)"),
        ([("a", (6, 0), (3, 4))], "not inside the tensor's shape (8, 4)"),
        ([("a", (-1, 0), (3, 4))], "not inside the tensor's shape (8, 4)"),
        ([("a", (0, 0), (1, 8, 4))], "not inside the tensor's shape (8, 4)"),
        ([("a", (0, 0), (4, 4)), ("a", (4, 0), (4, 4))], "two regions called 'a'"),
        ([("a", (0, 0), (5, 4)), ("b", (4, 0), (4, 4))], "overlap: 'a' and 'b'"),
        ([("a", (0, 0), (8, 2)), ("b", (4, 2), (1, 1)), ("c", (6, 1), (1, 2))], "overlap: 'a' and 'c'"),
    ],
)
def test_nonsense_in_a_table_is_refused_with_the_tensor_and_the_words(named: Any, words: str) -> None:
    with pytest.raises(PublishError) as error:
        checked("w", (8, 4), named)
    assert "'w'" in str(error.value) and words in str(error.value)


def test_a_checkpoint_name_given_twice_is_refused_across_tensors_and_across_ranks() -> None:
    tensors = [("a", torch.ones(4)), ("b", torch.zeros(4))]
    with pytest.raises(PublishError, match="two different tensors are named 'x' \\('a' and 'b'\\)"):
        Sources(tensors, names=lambda n: [("x", (0,), (2,))]).held()
    said = [
        [h.describe() for h in Sources([pair], names=lambda n: [("x", (0,), (2,))]).held()]
        for pair in tensors
    ]
    with pytest.raises(PublishError, match="'x', 'a:x' on rank 0 and 'b:x' on rank 1"):
        merge(said)


def test_plain_experts_of_each_rank_may_share_one_name_in_the_trainer() -> None:
    """Expert parallelism without DTensors: [E / ranks, H] on every rank, other experts on each."""

    def of(rank: int) -> list[dict[str, Any]]:
        cut = [(f"experts.{2 * rank + i}", (i, 0), (4,)) for i in range(2)]
        held = Sources([("experts", torch.full((2, 4), float(rank)))], names=lambda n: cut).held()
        return [{**h.describe(), "fingerprint": fingerprint(h)} for h in held]

    sources = merge([of(0), of(1)])
    assert [(s.name, s.mesh.ranks, s.shape) for s in sources] == [
        (f"experts.{e}", (e // 2,), (4,)) for e in range(4)
    ]
    assert len({s.tensor for s in sources}) == 2


def test_ranks_that_cut_one_tensor_differently_are_named() -> None:
    said = [
        [
            h.describe()
            for h in Sources([("w", torch.zeros(4))], names=lambda n, r=rows: [("x", (0,), (r,))]).held()
        ]
        for rows in (2, 3)
    ]
    with pytest.raises(
        PublishError, match="'w:x' is cut into other checkpoint parameters on rank 0 than on rank 1"
    ):
        merge(said)


def test_tied_tensors_that_are_cut_alike_are_sent_once_and_others_refused() -> None:
    one = torch.zeros(4)
    pairs = [("a", one), ("b", one)]
    sources = Sources(pairs, names=lambda n: [(n + "0", (0,), (2,)), (n + "1", (2,), (2,))])
    assert [h.name for h in sources.held()] == ["a:a0"] and sources.aliases == {"b0": "a0", "b1": "a1"}
    with pytest.raises(PublishError, match="one tensor, but `names` cuts them differently"):
        Sources(pairs, names={"a": [("a0", (0,), (2,))]}).held()


def test_what_ranks_say_packs_each_mesh_once_and_comes_back_equal() -> None:
    mesh = {"shape": [1024], "ranks": list(range(1024))}
    entries: list[dict[str, Any]] = [
        {"name": f"w{i}", "shape": [1024], "dtype": "bfloat16", "mesh": mesh, "placements": [["shard", 0]],
         "parameter": True, "parts": None, "fingerprint": None}
        for i in range(1000)
    ]  # fmt: skip
    entries.append({**entries[0], "name": "plain", "mesh": None, "placements": None})
    data = pack(entries)
    assert unpack(data) == entries and len(data) < 200_000


# ---- adapters ----------------------------------------------------------------------------------------------


class Lora(nn.Module):
    """The shape of PEFT's layer: the base inside, adapters beside it. `test_families` has the real one."""

    def __init__(self, base: nn.Linear, merged: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.active_adapters = ["default"]
        self.merged_adapters = ["default"] if merged else []


class Adapted(nn.Module):
    """One layer with an adapter and one without."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.q_proj = Lora(nn.Linear(4, 4), merged)
        self.fc1 = nn.Linear(4, 4, bias=False)


def test_names_lose_the_inner_layer_only_where_there_is_one() -> None:
    names = [h.name for h in Sources(Adapted(merged=True)).held()]
    assert names == ["q_proj.weight", "q_proj.bias", "fc1.weight"]


def test_adapters_that_are_not_merged_are_refused_at_any_publish() -> None:
    model = Adapted(merged=False)
    with pytest.raises(
        PublishError, match=r"'q_proj.lora_A.default.weight' .* merge .* or send it as an adapter"
    ):
        Sources(model).held()
    model = Adapted(merged=True)
    sources = Sources(model)
    sources.held()
    model.q_proj.merged_adapters = []
    with pytest.raises(PublishError, match="not merged"):
        sources.held()


def test_an_adapter_that_only_part_of_the_active_ones_is_merged_of_is_refused() -> None:
    model = Adapted(merged=True)
    model.q_proj.active_adapters = ["default", "other"]
    with pytest.raises(PublishError, match="not merged"):
        Sources(model).held()


def test_named_tensors_of_peft_lose_its_prefix_and_its_adapters_are_refused() -> None:
    base = ("base_model.model.model.layers.1.q_proj.base_layer.weight", torch.ones(2))
    assert [h.name for h in Sources([base]).held()] == ["model.layers.1.q_proj.weight"]
    adapter = ("base_model.model.model.layers.1.q_proj.lora_A.weight", torch.zeros(2))
    with pytest.raises(PublishError, match=r"merge .* or send it as an adapter"):
        Sources([base, adapter]).held()


def test_layers_that_an_adapter_saves_whole_take_the_place_of_the_original() -> None:
    model = nn.Module()
    model.head = nn.Module()
    model.head.original_module = nn.Linear(2, 2, bias=False)
    model.head.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})
    model.head.active_adapter = "default"
    (held,) = Sources(model).held()
    assert held.name == "head.weight" and held.tensor is model.head.modules_to_save["default"].weight
    model.head.active_adapter = ["default", "other"]
    with pytest.raises(PublishError, match="activate one adapter"):
        Sources(model).held()
