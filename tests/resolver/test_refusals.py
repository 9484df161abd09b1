"""What is refused, on live modules with one thing changed, and the other forms that checkpoints come in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.resolver.matrix import DTYPE, WANT, Folders, bits, fill, flip, load, move, resolved_as, tensors
from tests.resolver.models import ARCHITECTURES, Architecture
from torch import nn

from weightsync_engine.layout.boxes import Box
from weightsync_engine.mover.slab import Slab
from weightsync_engine.resolve import modules
from weightsync_engine.resolve.checkpoint import Checkpoint, open_checkpoint
from weightsync_engine.resolve.experts import KEEPS_WEIGHTS
from weightsync_engine.resolve.manifest import TRANSFORMS, UNTOLD, Resolved, resolve
from weightsync_engine.resolve.offline import OfflineWorker, Parallel, build_worker
from weightsync_engine.vllm.shadow import Shadow

EXPERTS = "model.layers.1.mlp.experts.routed_experts"


def named(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def checkpoint(folders: Folders) -> Iterator[Checkpoint]:
    with open_checkpoint(str(folders(named("Qwen3MoeForCausalLM"), 1)), None, "auto") as opened:
        yield opened


@pytest.fixture
def model(folders: Folders) -> nn.Module:
    return build_worker(
        folders(named("Qwen3MoeForCausalLM"), 1), 1, Parallel(2), weights=True, dtype=DTYPE
    ).model


def reasons(model: nn.Module, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Of the changed layer's experts; everything else is resolved."""
    resolved = resolve(model, checkpoint, "test")
    unresolved = resolved.manifest.unresolved
    assert {name.rpartition(".")[0] for name in unresolved} == {EXPERTS}, unresolved
    assert not [p for p in resolved.manifest.pieces if p.tensor.startswith(EXPERTS)]
    assert resolved.other_bytes == sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if n.startswith(EXPERTS)
    )
    return unresolved


def one_reason(model: nn.Module, checkpoint: Checkpoint | None) -> str:
    found = reasons(model, checkpoint)
    assert set(found) == {f"{EXPERTS}.w13_weight", f"{EXPERTS}.w2_weight"}, "once each, not once per expert"
    (reason,) = set(found.values())
    return reason


# ---- experts: the kernel, not the shape, says how they lie -------------------------------------------------


def test_experts_of_a_build_that_packs_them_are_refused(
    model: nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = model.get_submodule(EXPERTS).quant_method.moe_kernel
    kind = type(kernel.fused_experts)
    original = type("CPU", (kind,), {"__module__": kind.__module__})
    monkeypatch.setattr(kernel.fused_experts, "__class__", original)
    assert "packed form" in one_reason(model, checkpoint)


def test_a_kernel_that_swaps_the_halves_at_the_same_shape_is_refused_by_its_name(
    model: nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C05
    kernel = model.get_submodule(EXPERTS).quant_method.moe_kernel
    swapping = type("FlashInferExperts", (type(kernel.fused_experts),), {"__module__": "vllm.x.flashinfer"})
    monkeypatch.setattr(kernel.fused_experts, "__class__", swapping)
    said = one_reason(model, checkpoint)
    assert "FlashInferExperts" in said
    assert "--moe-backend triton" in said


def test_swapped_halves_that_no_kernel_confesses_are_found_by_their_values(
    model: nn.Module, checkpoint: Checkpoint
) -> None:
    w13 = model.get_parameter(f"{EXPERTS}.w13_weight")
    gate, up = w13.data.chunk(2, dim=1)
    w13.data.copy_(torch.cat([up, gate], dim=1))
    unresolved = resolve(model, checkpoint).manifest.unresolved
    assert set(unresolved) == {
        f"model.layers.1.mlp.experts.{e}.{half}_proj.weight" for e in range(8) for half in ("gate", "up")
    }


def test_an_unknown_kernel_is_refused(
    model: nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.get_submodule(EXPERTS).quant_method, "moe_kernel", None)
    assert "which kernel" in one_reason(model, checkpoint)


def test_only_triton_and_kernels_that_say_so_keep_their_weights() -> None:
    from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from weightsync_engine.resolve.experts import _check_kernel

    def method(kind: type) -> Any:
        return type("Method", (), {"moe_kernel": type("Kernel", (), {"fused_experts": object.__new__(kind)})})

    _check_kernel(method(TritonExperts), "m")
    _check_kernel(method(BatchedTritonExperts), "m")
    own = type("Own", (), {KEEPS_WEIGHTS: True})
    _check_kernel(method(own), "m")
    for kind in (type("Heir", (own,), {}), type("Heir", (TritonExperts,), {})):
        with pytest.raises(ValueError, match="Heir"):
            _check_kernel(method(kind), "m")


def test_experts_of_four_dimensions_are_refused_with_their_shape(
    model: nn.Module, checkpoint: Checkpoint
) -> None:
    # C05
    w13 = model.get_parameter(f"{EXPERTS}.w13_weight")
    w13.data = w13.data.view(8, 2, -1, 256).clone()
    ((name, reason),) = resolve(model, checkpoint).manifest.unresolved.items()
    assert name == f"{EXPERTS}.w13_weight"
    assert "[8, 2, 64, 256]" in reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: setattr(m.moe_config.moe_parallel_config, "enable_eplb", True), "load balancing"),
        (lambda m: setattr(m.moe_config, "num_logical_experts", 6), "held twice"),
        (lambda m: setattr(m.moe_config, "intermediate_size_per_partition_unpadded", 60), "pads experts"),
        (lambda m: setattr(m.expert_map_manager, "num_fused_shared_experts", 1), "shared experts are fused"),
        (
            lambda m: setattr(m, "quant_method", type("Fp8MoEMethod", (nn.Module,), {})()),
            "Fp8MoEMethod",
        ),
    ],
    ids=["load-balancing", "redundant", "padded", "fused-shared", "quantised"],
)
def test_experts_that_do_not_lie_as_loaded_are_refused(
    model: nn.Module, checkpoint: Checkpoint, change: Any, word: str
) -> None:
    change(model.get_submodule(EXPERTS))
    assert word in one_reason(model, checkpoint)


# ---- experts: other forms of checkpoints -------------------------------------------------------------------


def stacked(folder: Path, target: Path, per_expert: bool) -> Path:
    """The same checkpoint with gate and up side by side, of each expert or of all of them stacked."""
    values = load(folder)
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts"
        joined = [
            torch.cat([values.pop(f"{stem}.{e}.{half}_proj.weight") for half in ("gate", "up")])
            for e in range(8)
        ]
        if per_expert:
            values |= {f"{stem}.{e}.gate_up_proj.weight": both for e, both in enumerate(joined)}
            continue
        values[f"{stem}.gate_up_proj"] = torch.stack(joined)
        values[f"{stem}.down_proj"] = torch.stack(
            [values.pop(f"{stem}.{e}.down_proj.weight") for e in range(8)]
        )
    save_file(values, target / "model.safetensors")
    return target


@pytest.mark.parametrize("per_expert", [False, True], ids=["stacked", "joined-per-expert"])
@pytest.mark.parametrize("parallel", [Parallel(2), Parallel(4, experts=True)], ids=str)
def test_experts_are_found_in_the_other_forms_of_checkpoints(
    folders: Folders, tmp_path: Path, parallel: Parallel, per_expert: bool
) -> None:
    moe = named("Qwen3MoeForCausalLM")
    first = stacked(folders(moe, 1), tmp_path / "a", per_expert)
    second = stacked(folders(moe, 2), tmp_path / "b", per_expert)
    for rank in range(parallel.workers):
        moved = move(first, second, parallel, rank)
        assert moved.resolved.manifest.unresolved == {}
        fresh = dict(tensors(build_worker(folders(moe, 2), rank, parallel, weights=True, dtype=DTYPE).model))
        for name, tensor in fresh.items():
            assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"


def test_stacked_experts_of_one_worker_are_two_regions_and_not_one_per_expert(
    folders: Folders, tmp_path: Path
) -> None:
    folder = stacked(folders(named("Qwen3MoeForCausalLM"), 1), tmp_path / "a", False)
    worker = build_worker(folder, 1, Parallel(2), weights=True, dtype=DTYPE)
    with open_checkpoint(str(folder), None, "auto") as checkpoint:
        manifest = resolve(worker.model, checkpoint).manifest
    pieces = [p for p in manifest.pieces if p.name == "model.layers.0.mlp.experts.gate_up_proj"]
    assert [(p.box, p.at) for p in pieces] == [
        (Box((0, 64, 0), (8, 64, 256)), (0, 0, 0)),
        (Box((0, 192, 0), (8, 64, 256)), (0, 64, 0)),
    ]


# ---- derived state -----------------------------------------------------------------------------------------


def test_absorbed_attention_matrices_are_written_with_the_weight_that_they_are_views_of(
    folders: Folders,
) -> None:
    deepseek = named("DeepseekV3ForCausalLM")
    first, second = folders(deepseek, 1), folders(deepseek, 2)
    moved = move(first, second, Parallel(2), 1)
    views = {n: t for n, t in moved.after.items() if n.rpartition(".")[2] in ("W_UV", "W_UK_T")}
    assert len(views) == 4
    assert all(not torch.equal(t, moved.before[n]) for n, t in views.items())


def test_absorbed_attention_matrices_that_are_copies_are_refused_with_their_source(folders: Folders) -> None:
    # C04
    folder = folders(named("DeepseekV3ForCausalLM"), 1)
    model = build_worker(folder, weights=True, dtype=DTYPE).model
    module = next(m for n, m in model.named_modules() if "W_UV" in m._parameters and ".0." in n)
    module.W_UV = nn.Parameter(module.W_UV.data.clone(), requires_grad=False)
    with open_checkpoint(str(folder), None, "auto") as checkpoint:
        unresolved = resolve(model, checkpoint).manifest.unresolved
    assert "W_UV" in unresolved.pop("model.layers.0.self_attn.kv_b_proj.weight")
    assert all(name.endswith("W_UV") and "W_UV" in why for name, why in unresolved.items())


# ---- parameters without a loader ---------------------------------------------------------------------------


def test_a_share_that_the_values_do_not_tell_is_left_to_vllms_loader(
    folders: Folders, tmp_path: Path
) -> None:
    gpt = named("GptOssForCausalLM")
    values = load(folders(gpt, 1))
    values["model.layers.0.self_attn.sinks"].zero_()
    (tmp_path / "config.json").write_text((folders(gpt, 1) / "config.json").read_text())
    save_file(values, tmp_path / "model.safetensors")
    worker = build_worker(tmp_path, 1, Parallel(2), weights=True, dtype=DTYPE)
    resolved = loaded(worker, tmp_path).manifest
    assert resolved.unresolved == {}
    assert resolved.fallback["model.layers.0.self_attn.sinks"] == UNTOLD
    (piece,) = [p for p in resolved.pieces if p.name == "model.layers.1.self_attn.sinks"]
    assert piece.box == Box((4,), (4,))


def test_all_values_of_a_parameter_without_a_loader_are_compared(folders: Folders) -> None:
    folder = folders(named("GptOssForCausalLM"), 1)
    model = build_worker(folder, weights=True, dtype=DTYPE).model
    model.get_parameter("model.layers.0.attn.sinks").data[3] += 1
    with open_checkpoint(str(folder), None, "auto") as checkpoint:
        assert "model.layers.0.self_attn.sinks" in resolve(model, checkpoint).manifest.unresolved


def test_sinks_of_which_the_kernel_keeps_a_copy_are_refused(folders: Folders) -> None:
    folder = folders(named("GptOssForCausalLM"), 1)
    model = build_worker(folder, weights=True, dtype=DTYPE).model
    attention = model.get_submodule("model.layers.0.attn.attn")
    attention.impl.sinks = attention.impl.sinks.to(torch.float64)
    with open_checkpoint(str(folder), None, "auto") as checkpoint:
        resolved = resolve(model, checkpoint).manifest
    assert "float64" in resolved.unresolved["model.layers.0.self_attn.sinks"]
    assert "model.layers.1.self_attn.sinks" in resolved.expected


def test_a_buffer_is_a_destination_exactly_if_the_checkpoint_has_it(
    folders: Folders, model: nn.Module, tmp_path: Path
) -> None:
    # C04
    values = load(folders(named("Qwen3MoeForCausalLM"), 1)) | {"model.norm.factor": torch.tensor([1.5, 2.5])}
    save_file(values, tmp_path / "model.safetensors")
    norm = model.get_submodule("model.norm")
    norm.register_buffer("factor", torch.tensor([1.5, 2.5]))
    norm.register_buffer("own", torch.tensor([3.5]))
    with open_checkpoint(str(tmp_path), None, "auto") as checkpoint:
        resolved = resolve(model, checkpoint)
        assert resolved.manifest.unresolved == {}
        assert resolved.manifest.expected["model.norm.factor"].shape == (2,)
        assert "model.norm.own" not in resolved.views
        norm.factor.add_(1)
        assert "model.norm.factor" in resolve(model, checkpoint).manifest.unresolved


def test_layers_wrapped_for_adapters_are_refused(
    model: nn.Module, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # C26
    module = model.get_submodule("model.layers.0.self_attn.o_proj")
    wrapped = type("RowParallelLinearWithLoRA", (type(module),), {"__module__": "vllm.lora.layers.row"})
    monkeypatch.setattr(module, "__class__", wrapped)
    unresolved = resolve(model, checkpoint).manifest.unresolved
    assert list(unresolved) == ["model.layers.0.self_attn.o_proj.weight"]
    assert "LoRA" in unresolved["model.layers.0.self_attn.o_proj.weight"]


# ---- vLLM's own loader ---------------------------------------------------------------------------------------


def loaded(worker: OfflineWorker, folder: Path) -> Resolved:
    before = {name: tensor.clone() for name, tensor in tensors(worker.model)}
    resolved = resolved_as(worker, folder)
    after = dict(tensors(worker.model))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert torch.equal(bits(tensor), bits(before[name])), f"{name} is not what it was before the trial"
    return resolved


@pytest.fixture
def gpt(folders: Folders) -> tuple[Path, OfflineWorker]:
    folder = folders(named("GptOssForCausalLM"), 1)
    return folder, build_worker(folder, 1, Parallel(2), weights=True, dtype=DTYPE)


def test_rows_permuted_within_each_head_are_found_by_their_values(folders: Folders) -> None:
    """Such a permutation keeps the first and the last row of a head where they are."""
    folder = folders(ARCHITECTURES[0], 1)
    worker = build_worker(folder, weights=True, dtype=DTYPE)
    o_proj = worker.model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    o_proj.data.copy_(o_proj.data.view(8, 16, 2, 256).transpose(1, 2).reshape(256, 256))
    said = loaded(worker, folder).manifest.unresolved["model.layers.0.self_attn.o_proj.weight"]
    assert said.startswith(TRANSFORMS)
    assert "leaves other values in model.layers.0.self_attn.o_proj.weight" in said


def test_a_permutation_that_the_models_loader_makes_is_left_to_it(folders: Folders) -> None:
    """Llama 4, without the declaration by which it is known: the values tell it too."""
    llama = named("Llama4ForCausalLM")
    folder = folders(llama, 1)
    worker = build_worker(folder, weights=True, dtype=DTYPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modules, "_permuted", lambda model: {})
        fallback = loaded(worker, folder).manifest.fallback
    assert fallback["model.layers.0.self_attn.q_proj.weight"] == TRANSFORMS
    assert "shares a live tensor" in fallback["model.layers.0.self_attn.v_proj.weight"], (
        "no tensor is half direct"
    )


def test_a_loader_that_fails_when_it_is_tried_is_not_used(
    gpt: tuple[Path, OfflineWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worker = gpt
    load_weights = worker.model.load_weights

    def once(weights: Any) -> Any:
        next(iter(weights))
        raise RuntimeError("loaders work once only")

    monkeypatch.setattr(worker.model, "load_weights", once)
    manifest = loaded(worker, folder).manifest
    assert manifest.fallback == {}
    said = set(manifest.unresolved.values())
    assert len(said) == 1
    assert "GptOssRoutedExperts" in min(said) and "loaders work once only" in min(said)
    monkeypatch.setattr(worker.model, "load_weights", load_weights)
    assert loaded(worker, folder).manifest.unresolved == {}


@pytest.mark.parametrize("kept", ["w13_weight", "w2_bias"])
def test_a_loader_that_leaves_something_as_it_was_is_not_used(
    gpt: tuple[Path, OfflineWorker], monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    folder, worker = gpt
    load_weights = worker.model.load_weights
    checkpoints = {"w13_weight": "gate_up_proj", "w2_bias": "down_proj_bias"}[kept]
    monkeypatch.setattr(
        worker.model,
        "load_weights",
        lambda weights: load_weights((n, t) for n, t in weights if n.rpartition(".")[2] != checkpoints),
    )
    manifest = loaded(worker, folder).manifest
    assert manifest.fallback == {}
    assert all(
        f"routed_experts.{kept}" in why.partition("it leaves")[2] for why in manifest.unresolved.values()
    )


def test_a_loader_that_stops_early_or_replaces_memory_is_not_used(
    gpt: tuple[Path, OfflineWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worker = gpt
    load_weights = worker.model.load_weights
    experts = worker.model.get_submodule("model.layers.0.mlp.experts.routed_experts")
    with monkeypatch.context() as patch:
        patch.setattr(worker.model, "load_weights", lambda weights: {next(iter(weights))[0]})
        assert "left the rest unread" in min(loaded(worker, folder).manifest.unresolved.values())

    def replacing(weights: Any) -> Any:
        done = load_weights(weights)
        experts._parameters["w2_weight"] = nn.Parameter(
            experts.w2_weight.detach().clone(), requires_grad=False
        )
        return done

    address = experts.w2_weight.data_ptr()
    with monkeypatch.context() as patch:
        patch.setattr(worker.model, "load_weights", replacing)
        told = loaded(worker, folder).manifest.unresolved
    assert any("moves model.layers.0.mlp.experts.routed_experts.w2_weight" in why for why in told.values())
    assert experts.w2_weight.data_ptr() == address
    assert {name.split(".")[2] for name in told} == {"0"}, "the other layer's experts can be loaded"


def test_experts_of_an_unknown_kernel_go_through_vllms_reload_only_if_it_restores_them(
    gpt: tuple[Path, OfflineWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worker = gpt
    for layer in (0, 1):
        kernel = worker.model.get_submodule(
            f"model.layers.{layer}.mlp.experts.routed_experts"
        ).quant_method.moe_kernel
        kind = type(kernel.fused_experts)
        other = type("OtherExperts", (kind,), {"__module__": "vllm.x.other"})
        monkeypatch.setattr(kernel.fused_experts, "__class__", other)
    told = loaded(worker, folder).manifest
    assert told.fallback == {}, "gpt-oss's loader writes past a reload, which then keeps the old values"
    assert all("OtherExperts" in why and "cannot be used" in why for why in told.unresolved.values())


def with_copies(worker: OfflineWorker) -> None:
    """As some platforms have it: absorbed matrices that are no views of the weight."""
    for module in worker.model.modules():
        for leaf in ("W_UV", "W_UK_T") if "W_UV" in module._parameters else ():
            module._parameters[leaf] = nn.Parameter(
                module._parameters[leaf].data.clone(), requires_grad=False
            )


def test_absorbed_matrices_that_are_copies_are_made_anew_in_their_memory_by_vllms_reload(
    folders: Folders,
) -> None:
    # C04, C28
    first, second, third = (folders(named("DeepseekV3ForCausalLM"), seed) for seed in (1, 2, 3))
    worker = build_worker(first, 1, Parallel(2), weights=True, dtype=DTYPE)
    with_copies(worker)
    where = {n: t.data_ptr() for n, t in tensors(worker.model)}
    resolved = loaded(worker, first)
    weights = {f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in (0, 1)}
    assert (resolved.manifest.unresolved, set(resolved.manifest.fallback)) == ({}, weights)
    shadow = Shadow(resolved, Slab.create(resolved.slab_bytes))
    for number, folder in enumerate((second, third, second), start=1):
        shadow.slab.begin_write()
        fill(resolved, shadow.slab, load(folder))
        flip(worker, shadow, number)
        live = dict(tensors(worker.model))
        assert {n: t.data_ptr() for n, t in live.items()} == where
        fresh = dict(tensors(build_worker(folder, 1, Parallel(2), weights=True, dtype=DTYPE).model))
        for name, tensor in fresh.items():
            assert torch.equal(bits(live[name]), bits(tensor)), name


@pytest.mark.parametrize("leaf", ["W_UV", "W_UK_T"])
def test_a_reload_that_moves_an_absorbed_matrix_or_leaves_it_is_not_used(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, leaf: str
) -> None:
    """Captured graphs would go on to read the old one."""
    # C28
    from vllm.model_executor.layers.attention import mla_attention

    folder = folders(named("DeepseekV3ForCausalLM"), 1)
    worker = build_worker(folder, 1, Parallel(2), weights=True, dtype=DTYPE)
    with_copies(worker)
    replace_parameter = mla_attention.replace_parameter

    def moving(layer: nn.Module, name: str, tensor: torch.Tensor, prefer_copy: bool = False) -> None:
        replace_parameter(layer, name, tensor, prefer_copy and name != leaf)

    with monkeypatch.context() as patch:
        patch.setattr(mla_attention, "replace_parameter", moving)
        told = loaded(worker, folder).manifest
    assert told.fallback == {}
    for layer in (0, 1):
        why = told.unresolved[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        assert f"{leaf} to other memory" in why

    def leaving(layer: nn.Module, name: str, *rest: Any, **more: Any) -> None:
        if name != leaf:
            replace_parameter(layer, name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(mla_attention, "replace_parameter", leaving)
        told = loaded(worker, folder).manifest
    assert told.fallback == {}
    assert f"{leaf}" in told.unresolved["model.layers.0.self_attn.kv_b_proj.weight"].partition("it leaves")[2]


def test_a_loader_that_fails_in_a_flip_leaves_the_worker_torn_and_names_the_parameter(
    gpt: tuple[Path, OfflineWorker], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worker = gpt
    second = folders(named("GptOssForCausalLM"), 2)
    resolved = loaded(worker, folder)
    shadow = Shadow(resolved, Slab.create(resolved.slab_bytes))
    shadow.slab.begin_write()
    fill(resolved, shadow.slab, load(second))
    shadow.slab.stamp(WANT.version, 1)
    load_weights = worker.model.load_weights

    def failing(weights: Any) -> Any:
        taken = iter(weights)
        load_weights([next(taken)])
        next(taken)
        raise RuntimeError("no more")

    with monkeypatch.context() as patch, worker.within():
        patch.setattr(worker.model, "load_weights", failing)
        problem = shadow.flip(WANT)
    assert problem is not None
    assert problem.reason == "LoaderFailed"
    assert sorted(resolved.manifest.fallback)[1] in problem.message and "no more" in problem.message
    assert shadow.torn and shadow.live is None
    calls = []
    with monkeypatch.context() as patch, worker.within():
        patch.setattr(worker.model, "load_weights", lambda w: calls.append(w) or load_weights(w))
        assert shadow.flip(WANT) is None
        assert shadow.flip(WANT) is None, "asked again, it answers as before"
    assert len(calls) == 1, "one load_weights for a flip"
    assert not shadow.torn and shadow.live == WANT and 0 < shadow.loader_seconds <= shadow.seconds
    fresh = build_worker(second, 1, Parallel(2), weights=True, dtype=DTYPE)
    after = dict(tensors(worker.model))
    assert all(torch.equal(bits(after[n]), bits(t)) for n, t in tensors(fresh.model))
    ((_, wholes),) = resolved.loaders
    again = {n: shadow.slab.tensor(resolved.manifest.tensors[t]) for n, t in wholes.items()}
    assert all(torch.equal(again[n], t) for n, t in load(second).items() if n in again), "it is given copies"
