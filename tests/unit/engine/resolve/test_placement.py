"""Names by whole components, one destination for one storage, and a reason for everything that has no
place."""

import random
from collections.abc import Mapping

import pytest

from weightsync_engine.layout.boxes import Box
from weightsync_engine.resolve.names import CheckpointNames, NameRules
from weightsync_engine.resolve.placement import LiveTensor, Placed, Slot, place
from weightsync_engine.resolve.shards import merged, qkv, vocabulary

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def live(name: str, shape: tuple[int, ...], runs: tuple = (), **more: object) -> LiveTensor:
    return LiveTensor(
        **{"name": name, "shape": shape, "dtype": "float32", "storage": name, "runs": runs} | more
    )


QKV = qkv(4, 2, 4, 4, 1, 0)
GATE_UP = tuple(merged([8, 8], 1, 0))


def model(
    packed: Mapping[str, tuple[str, ...]] = PACKED,
) -> tuple[list[LiveTensor], dict[str, tuple[int, ...]]]:
    tensors, shapes = [], {}
    for layer in (1, 11):
        stem = f"layers.{layer}"
        tensors += [
            live(f"{stem}.self_attn.qkv_proj.weight", (32, 16), QKV),
            live(f"{stem}.mlp.gate_up_proj.weight", (16, 16), GATE_UP),
        ]
        shapes |= {f"{stem}.self_attn.q_proj.weight": (16, 16), f"{stem}.self_attn.k_proj.weight": (8, 16)}
        shapes |= {f"{stem}.self_attn.v_proj.weight": (8, 16)}
        shapes |= {f"{stem}.mlp.gate_proj.weight": (8, 16), f"{stem}.mlp.up_proj.weight": (8, 16)}
    tensors += [
        live("layers.1.mlp.gate.weight", (4, 16)),
        live("model.gate_projections.0.weight", (4, 4)),
        live("layers.1.mlp.shared_expert.gate_up_proj.weight", (16, 16), GATE_UP),
    ]
    shapes |= {"layers.1.mlp.gate.weight": (4, 16), "model.gate_projections.0.weight": (4, 4)}
    shapes |= {"layers.1.mlp.shared_expert.gate_up_proj.weight": (16, 16)}
    return tensors, shapes


def test_names_are_matched_by_whole_components_and_rewritten_once() -> None:
    # C02
    tensors, shapes = model()
    found = place(tensors, CheckpointNames(NameRules(PACKED), shapes), shapes)
    assert found.unresolved == {}
    assert set(found.expected) == set(shapes)
    assert {name: whole.shape for name, whole in found.expected.items()} == shapes
    rows: dict[str, set[int]] = {}
    for placed in found.placed:
        held = set(range(placed.at[0], placed.at[0] + placed.box.shape[0]))
        assert not held & rows.get(placed.live, set()), f"{placed.live} is written twice"
        rows.setdefault(placed.live, set()).update(held)
        assert placed.name.split(".")[1] == placed.live.split(".")[1], "layers 1 and 11 are not the same"
    assert rows == {tensor.name: set(range(tensor.shape[0])) for tensor in tensors}


def test_the_order_of_rules_and_of_names_does_not_matter() -> None:
    tensors, shapes = model()
    wanted = place(tensors, CheckpointNames(NameRules(PACKED), shapes), shapes)
    for seed in range(5):
        shuffle = random.Random(seed).sample
        rules = NameRules(dict(shuffle(list(PACKED.items()), len(PACKED))))
        names = shuffle(list(shapes), len(shapes))
        found = place(shuffle(tensors, len(tensors)), CheckpointNames(rules, names), shapes)
        assert set(found.placed) == set(wanted.placed)


def test_a_parameter_that_is_fused_in_the_checkpoint_already_passes_through() -> None:
    tensors, shapes = model()
    found = place(tensors, CheckpointNames(NameRules(PACKED), shapes), shapes)
    name = "layers.1.mlp.shared_expert.gate_up_proj.weight"
    assert [p for p in found.placed if p.live == name] == [
        Placed(name, Box((0, 0), (8, 16)), name, (0, 0)),
        Placed(name, Box((8, 0), (8, 16)), name, (8, 0)),
    ]


def test_a_packed_parameter_that_the_checkpoint_lacks_is_named() -> None:
    tensors, shapes = model()
    del shapes["layers.11.self_attn.k_proj.weight"]
    found = place(tensors, CheckpointNames(NameRules(PACKED), shapes), shapes)
    assert list(found.unresolved) == ["layers.11.self_attn.qkv_proj.weight"]
    assert "layers.11.self_attn.k_proj.weight" in found.unresolved["layers.11.self_attn.qkv_proj.weight"]
    assert not [p for p in found.placed if p.live == "layers.11.self_attn.qkv_proj.weight"], "all or nothing"


def test_a_model_that_packs_another_number_of_parameters_than_its_layer_has_is_refused() -> None:
    tensor = live("mlp.qkvz.weight", (16, 16), tuple(merged([4, 4, 4, 4], 1, 0)))
    rules = NameRules({"qkvz": ("qk", "vz")})
    found = place([tensor], CheckpointNames(rules, ["mlp.qk.weight", "mlp.vz.weight"]), None)
    assert "2 checkpoint parameters" in found.unresolved["mlp.qkvz.weight"]
    assert "4 partitions" in found.unresolved["mlp.qkvz.weight"]


def test_a_shape_that_is_no_share_of_the_checkpoints_is_told_with_both() -> None:
    found = place(
        [live("norm.weight", (6,))], CheckpointNames(NameRules(), ["norm.weight"]), {"norm.weight": (24,)}
    )
    assert "[24]" in found.unresolved["norm.weight"]
    assert "[6]" in found.unresolved["norm.weight"]
    assert found.placed == ()


def test_names_are_mapped_as_the_model_declares() -> None:
    def forward(name: str) -> str | None:
        return name.replace("model.language_model.", "language_model.model.", 1)

    tensor = live("language_model.model.mlp.gate_up_proj.weight", (16, 16), GATE_UP)
    wanted = {"model.language_model.mlp.gate_proj.weight", "model.language_model.mlp.up_proj.weight"}
    rules = NameRules(PACKED, forward, prefixes={"model.language_model.": "language_model.model."})
    for known in (wanted, None):
        found = place([tensor], CheckpointNames(rules, known), None)
        assert found.unresolved == {}
        assert set(found.expected) == wanted


def test_two_checkpoint_names_for_one_live_tensor_are_refused() -> None:
    rules = NameRules(forward=lambda name: name.removeprefix("old."))
    found = place([live("a.weight", (4,))], CheckpointNames(rules, ["a.weight", "old.a.weight"]), None)
    assert "a.weight, old.a.weight all map" in found.unresolved["a.weight"]


# ---- tied embeddings ---------------------------------------------------------------------------------------

VOCABULARY = vocabulary(10, 0, 5, 8)
EMBED = live("model.embed_tokens.weight", (8, 4), (VOCABULARY,))


@pytest.mark.parametrize(
    "known", [["model.embed_tokens.weight"], ["model.embed_tokens.weight", "lm_head.weight"]]
)
def test_a_tied_head_is_one_write_and_never_missing(known: list[str]) -> None:
    # C12
    head = live("lm_head.weight", (8, 4), storage=EMBED.storage, borrowed=True)
    for order in ([EMBED, head], [head, EMBED]):
        found = place(order, CheckpointNames(NameRules(), known), dict.fromkeys(known, (10, 4)))
        assert found.unresolved == {}
        assert found.placed == (
            Placed("model.embed_tokens.weight", Box((0, 0), (5, 4)), "model.embed_tokens.weight", (0, 0)),
        )
        assert found.aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_an_untied_head_is_a_destination_of_its_own() -> None:
    head = live("lm_head.weight", (8, 4), (VOCABULARY,))
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    found = place([EMBED, head], CheckpointNames(NameRules(), names), dict.fromkeys(names, (10, 4)))
    assert {p.name for p in found.placed} == set(names)
    assert found.aliases == {}


def test_an_untied_head_that_the_checkpoint_lacks_is_uncovered_and_never_counted_as_tied() -> None:
    head = live("lm_head.weight", (8, 4), (VOCABULARY,))
    known = ["model.embed_tokens.weight"]
    found = place([EMBED, head], CheckpointNames(NameRules(), known), dict.fromkeys(known, (10, 4)))
    assert list(found.unresolved) == ["lm_head.weight"]


def test_what_is_wrong_with_memory_under_one_name_is_wrong_under_the_other() -> None:
    head = live("lm_head.weight", (8, 4), storage=EMBED.storage, borrowed=True, problem="a packed copy")
    found = place([EMBED, head], CheckpointNames(NameRules(), None), None)
    assert found.unresolved == {
        "model.embed_tokens.weight": "a packed copy",
        "lm_head.weight": "a packed copy",
    }
    assert found.placed == ()


def test_a_problem_is_told_under_the_checkpoints_names() -> None:
    tensor = live("a.gate_up_proj.weight", (16, 16), GATE_UP, problem="quantised")
    found = place(
        [tensor], CheckpointNames(NameRules(PACKED), ["a.gate_proj.weight", "a.up_proj.weight"]), None
    )
    assert found.unresolved == {"a.gate_proj.weight": "quantised", "a.up_proj.weight": "quantised"}


# ---- layers that are not cut, shares that nothing but the shapes tells, and experts ------------------------


def test_a_layer_inside_a_group_that_is_not_cut_is_held_whole_by_every_worker() -> None:
    # C24
    for rank in range(4):
        # tp 4, but the layer's own size is 1; its rank in the group must play no part.
        tensor = live("attn.fused_qkv_a_proj.weight", (24, 16), tuple(merged([16, 8], 1, 0)), group=(4, rank))
        rules = NameRules({"fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")})
        shapes = {"attn.q_a_proj.weight": (16, 16), "attn.kv_a_proj_with_mqa.weight": (8, 16)}
        found = place([tensor], CheckpointNames(rules, shapes), shapes)
        assert [(p.box, p.at) for p in found.placed] == [
            (Box((0, 0), (16, 16)), (0, 0)),
            (Box((0, 0), (8, 16)), (16, 0)),
        ]


def test_a_parameter_without_a_loader_may_be_an_even_share_and_is_then_to_be_compared() -> None:
    tensor = live("attn.sinks", (4,), must_compare=True, group=(2, 1))
    found = place([tensor], CheckpointNames(NameRules(), ["attn.sinks"]), {"attn.sinks": (8,)})
    assert found.placed == (Placed("attn.sinks", Box((4,), (4,)), "attn.sinks", (0,)),)
    assert found.expected["attn.sinks"].shape == (8,)
    assert found.must_compare == {"attn.sinks"}
    assert found.guessed == {"attn.sinks": Box((0,), (4,))}, "the next worker's, from which it must differ"


@pytest.mark.parametrize("known", [(6,), (16,), (8, 1)], ids=["uneven", "of-four-workers", "another-rank"])
def test_a_shape_that_is_no_even_share_of_the_group_is_refused(known: tuple[int, ...]) -> None:
    tensor = live("attn.sinks", (4,), must_compare=True, group=(2, 1))
    found = place([tensor], CheckpointNames(NameRules(), ["attn.sinks"]), {"attn.sinks": known})
    assert list(found.unresolved) == ["attn.sinks"]


def experts(problem: str = "") -> LiveTensor:
    """Two local experts (2 and 3 of 4), by name or stacked."""
    each = tuple(
        Slot(f"mlp.experts.{e}.down_proj.weight", (4, 8), Box((0, 2), (4, 2)), (e - 2, 0, 0)) for e in (2, 3)
    )
    stacked = (Slot("mlp.experts.down_proj", (4, 4, 8), Box((2, 0, 2), (2, 4, 2)), (0, 0, 0)),)
    return live("mlp.experts.routed_experts.w2_weight", (2, 4, 2), slots=(each, stacked), problem=problem)


def test_experts_land_where_the_checkpoints_form_says() -> None:
    names = [f"mlp.experts.{e}.down_proj.weight" for e in range(4)]
    found = place([experts()], CheckpointNames(NameRules(), names), dict.fromkeys(names, (4, 8)))
    assert found.placed == tuple(
        Placed(names[e], Box((0, 2), (4, 2)), "mlp.experts.routed_experts.w2_weight", (e - 2, 0, 0))
        for e in (2, 3)
    )
    assert set(found.expected) == set(names[2:]), "experts of other workers are no business of this one"
    found = place([experts()], CheckpointNames(NameRules(), ["mlp.experts.down_proj"]), None)
    assert [p.box for p in found.placed] == [Box((2, 0, 2), (2, 4, 2))]


def test_experts_of_which_one_is_missing_are_refused_as_one() -> None:
    found = place([experts()], CheckpointNames(NameRules(), ["mlp.experts.2.down_proj.weight"]), None)
    assert list(found.unresolved) == ["mlp.experts.routed_experts.w2_weight"]
    assert found.placed == ()


def test_a_reason_for_experts_is_told_under_the_checkpoints_names() -> None:
    names = [f"mlp.experts.{e}.down_proj.weight" for e in range(4)]
    found = place([experts("swapped")], CheckpointNames(NameRules(), names), None)
    assert found.unresolved == dict.fromkeys(names[2:], "swapped")


def test_a_module_under_several_paths_is_found_under_the_one_that_the_checkpoint_has() -> None:
    tensor = live("attn.mla.kv_b_proj.weight", (4, 4), also=("attn.kv_b_proj.weight",))
    found = place([tensor], CheckpointNames(NameRules(), ["attn.kv_b_proj.weight"]), None)
    assert [p.name for p in found.placed] == ["attn.kv_b_proj.weight"]
    assert found.aliases == {}


def test_a_buffer_that_no_checkpoint_has_is_left_out() -> None:
    buffer = live("rotary.cos", (4,), optional=True, must_compare=True)
    assert place([buffer], CheckpointNames(NameRules(), ["other"]), None).unresolved == {}
    assert place([buffer], CheckpointNames(NameRules(), None), None).expected == {}
    assert set(place([buffer], CheckpointNames(NameRules(), ["rotary.cos"]), None).expected) == {"rotary.cos"}
