"""What goes to vLLM's own loader: everything that belongs together, or nothing of it."""

from collections.abc import Iterable

from weightsync_engine.resolve.fallback import Rerunnable, fall_back, give_up
from weightsync_engine.resolve.names import CheckpointNames, NameRules
from weightsync_engine.resolve.placement import LiveTensor, Placement, place
from weightsync_engine.resolve.shards import Rerun, merged

PACKED = {"gate_up_proj": ("gate_proj", "up_proj")}
GATE_UP = tuple(merged([8, 8], 1, 0))
DIRECT = LiveTensor("layers.0.norm.weight", (16,), "bfloat16", "norm")


def live(name: str, shape: tuple[int, ...] = (8, 16), **more: object) -> LiveTensor:
    return LiveTensor(**{"name": name, "shape": shape, "dtype": "bfloat16", "storage": name} | more)  # type: ignore[arg-type]


def found(
    tensors: Iterable[LiveTensor],
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, str] | None = None,
    rules: NameRules = NameRules(PACKED),  # noqa: B008 - frozen
) -> tuple[Placement, tuple[Rerunnable, ...]]:
    tensors = [DIRECT, *tensors]
    shapes = shapes | {DIRECT.name: (16,)}
    names = CheckpointNames(rules, shapes)
    return fall_back(place(tensors, names, shapes), tensors, names, shapes, dtypes or {})


def test_a_parameter_arrives_whole_in_the_checkpoints_shape_and_dtype() -> None:
    a_log = live("layers.0.mixer.A", (4,), problem="its loader computes -exp of it", rerun=Rerun())
    placement, groups = found([a_log], {"layers.0.mixer.A": (8,)}, {"layers.0.mixer.A": "float32"})
    assert placement.fallback == {"layers.0.mixer.A": "its loader computes -exp of it"}
    assert placement.unresolved == {}
    assert (placement.expected["layers.0.mixer.A"].shape, placement.expected["layers.0.mixer.A"].dtype) == (
        (8,),
        "float32",
    )
    assert [p.name for p in placement.placed] == [DIRECT.name]
    assert [(g.names, g.live, g.modules) for g in groups] == [
        (("layers.0.mixer.A",), ("layers.0.mixer.A",), ())
    ]


def test_what_the_loader_is_not_known_to_do_right_by_stays_refused_with_its_own_reason() -> None:
    empty = live("layers.0.o_proj.weight", (0,), problem="its live tensor is empty")
    placement, groups = found([empty], {"layers.0.o_proj.weight": (8, 16)})
    assert placement.unresolved == {"layers.0.o_proj.weight": "its live tensor is empty"}
    assert (placement.fallback, groups) == ({}, ())


def test_all_that_live_in_one_tensor_go_together() -> None:
    tensor = live("mlp.gate_up_proj.weight", (16, 16), runs=GATE_UP)
    shapes = {"mlp.gate_proj.weight": (8, 16), "mlp.up_proj.weight": (8, 16), DIRECT.name: (16,)}
    names = CheckpointNames(NameRules(PACKED), shapes)
    placed = place([tensor, DIRECT], names, shapes)
    placed.unresolved["mlp.gate_proj.weight"] = "transformed"
    placed.reruns["mlp.gate_proj.weight"] = Rerun()
    placement, (group,) = fall_back(placed, [tensor, DIRECT], names, shapes, {})
    assert group.names == ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    assert placement.fallback["mlp.gate_proj.weight"] == "transformed"
    assert placement.fallback["mlp.up_proj.weight"].endswith("transformed")
    assert [p.name for p in placement.placed] == [DIRECT.name]


EXPERTS = "layers.0.mlp.experts.routed_experts"
STACKED = {"layers.0.mlp.experts.gate_up": (4, 8, 16), "layers.0.mlp.experts.down": (4, 16, 8)}


def experts(leaf: str, **more: object) -> LiveTensor:
    return live(f"{EXPERTS}.{leaf}", (4, 8, 16), **{"problem": "loaded by X", "rerun": Rerun()} | more)


def test_tensors_that_nothing_names_get_all_that_nobody_else_claims_beside_them() -> None:
    placement, (group,) = found([experts("w13"), experts("w2")], STACKED | {"layers.0.other.weight": (3,)})
    assert placement.fallback == dict.fromkeys(STACKED, "loaded by X")
    assert group.names == tuple(sorted(STACKED))
    assert group.live == (f"{EXPERTS}.w13", f"{EXPERTS}.w2")


def test_hundreds_of_experts_go_once_each() -> None:
    # C28
    shapes = {f"layers.0.mlp.experts.{e}.{m}.weight": (8, 16) for e in range(384) for m in ("w1", "w2", "w3")}
    placement, (group,) = found([experts("w13"), experts("w2")], shapes)
    assert group.names == tuple(sorted(shapes))
    assert placement.fallback.keys() == shapes.keys()


def test_names_beside_something_that_is_direct_might_be_its_own_and_are_not_guessed() -> None:
    beside = live("layers.0.mlp.experts.gate.weight", (4, 16))
    shapes = STACKED | {beside.name: (4, 16)}
    placement, groups = found([experts("w13"), experts("w2"), beside], shapes)
    assert groups == ()
    assert all("cannot be told which parameters" in why for why in placement.unresolved.values())
    assert placement.unresolved.keys() == {f"{EXPERTS}.w13", f"{EXPERTS}.w2"}


def test_one_tensor_that_cannot_be_loaded_keeps_those_beside_it_from_the_loader() -> None:
    placement, groups = found([experts("w13"), experts("w2", rerun=None)], STACKED)
    assert groups == ()
    assert placement.unresolved[f"{EXPERTS}.w2"] == "loaded by X"
    assert f"would have to load {EXPERTS}.w2 as well" in placement.unresolved[f"{EXPERTS}.w13"]


def test_a_module_that_is_reloaded_is_reloaded_with_all_its_tensors() -> None:
    """It comes back with nothing but what was loaded into it; a scale that its processing makes has no name."""
    path = "layers.0.o_proj"
    tensors = [
        live(f"{path}.weight", problem="quantised", rerun=Rerun((path,))),
        live(f"{path}.bias", (8,)),
        live(f"{path}.weight_scale", (1,), problem="quantised", rerun=Rerun((path,))),
    ]
    placement, (group,) = found(tensors, {f"{path}.weight": (8, 16), f"{path}.bias": (8,)})
    assert group.names == (f"{path}.bias", f"{path}.weight")
    assert group.live == (f"{path}.bias", f"{path}.weight", f"{path}.weight_scale")
    assert group.modules == (path,)
    assert [p.name for p in placement.placed] == [DIRECT.name]


def test_a_copy_goes_with_what_it_was_computed_from() -> None:
    weight = live("attn.kv_b_proj.weight", problem="derived", rerun=Rerun(("attn",)))
    copy = live("attn.W_UV", problem="derived", rerun=Rerun(("attn",)), source=weight.storage)
    placement, (group,) = found([weight, copy], {weight.name: (8, 16)})
    assert group.names == (weight.name,)
    assert group.live == ("attn.W_UV", weight.name)
    assert placement.unresolved == {}


def test_a_dtype_that_cannot_travel_is_refused_by_its_name() -> None:
    tensor = live("layers.0.A", problem="transformed", rerun=Rerun())
    placement, groups = found([tensor], {"layers.0.A": (8, 16)}, {"layers.0.A": "F4"})
    assert groups == ()
    assert "of type F4" in placement.unresolved["layers.0.A"]


def test_a_group_that_fails_when_it_is_tried_is_refused_with_both_reasons() -> None:
    tensors = [live(f"layers.{i}.A", problem="transformed", rerun=Rerun()) for i in (1, 2)]
    placement, groups = found(tensors, {t.name: (8, 16) for t in tensors})
    placement = give_up(placement, groups[0], "it leaves other values")
    assert placement.unresolved == {"layers.1.A": "transformed; it leaves other values"}
    assert set(placement.expected) == {DIRECT.name, "layers.2.A"}
    assert placement.fallback.keys() == {"layers.2.A"}


def test_without_a_checkpoint_nothing_goes_to_the_loader() -> None:
    tensor = live("layers.0.A", problem="transformed", rerun=Rerun())
    names = CheckpointNames(NameRules(), None)
    placement, groups = fall_back(place([tensor], names, None), [tensor], names, None, {})
    assert placement.unresolved == {"layers.0.A": "transformed"}
    assert groups == ()
