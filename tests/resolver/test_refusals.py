"""What is refused, on live modules with one thing changed, and the other forms that checkpoints come in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.resolver.matrix import DTYPE, Folders, bits, load, move, tensors
from tests.resolver.models import ARCHITECTURES, Architecture
from torch import nn

from weightsync_engine.layout.boxes import Box
from weightsync_engine.resolve.checkpoint import Checkpoint, open_checkpoint
from weightsync_engine.resolve.experts import KEEPS_WEIGHTS
from weightsync_engine.resolve.manifest import UNTOLD, resolve
from weightsync_engine.resolve.offline import Parallel, build_worker

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

    _check_kernel(method(TritonExperts))
    _check_kernel(method(BatchedTritonExperts))
    own = type("Own", (), {KEEPS_WEIGHTS: True})
    _check_kernel(method(own))
    for kind in (type("Heir", (own,), {}), type("Heir", (TritonExperts,), {})):
        with pytest.raises(ValueError, match="Heir"):
            _check_kernel(method(kind))


def test_experts_of_four_dimensions_are_refused_with_their_shape(
    model: nn.Module, checkpoint: Checkpoint
) -> None:
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
    folder = folders(named("DeepseekV3ForCausalLM"), 1)
    model = build_worker(folder, weights=True, dtype=DTYPE).model
    module = next(m for n, m in model.named_modules() if "W_UV" in m._parameters and ".0." in n)
    module.W_UV = nn.Parameter(module.W_UV.data.clone(), requires_grad=False)
    with open_checkpoint(str(folder), None, "auto") as checkpoint:
        unresolved = resolve(model, checkpoint).manifest.unresolved
    assert "W_UV" in unresolved.pop("model.layers.0.self_attn.kv_b_proj.weight")
    assert all(name.endswith("W_UV") and "W_UV" in why for name, why in unresolved.items())


# ---- parameters without a loader ---------------------------------------------------------------------------


def test_a_share_that_the_values_do_not_tell_is_refused(folders: Folders, tmp_path: Path) -> None:
    gpt = named("GptOssForCausalLM")
    values = load(folders(gpt, 1))
    values["model.layers.0.self_attn.sinks"].zero_()
    (tmp_path / "config.json").write_text((folders(gpt, 1) / "config.json").read_text())
    save_file(values, tmp_path / "model.safetensors")
    model = build_worker(tmp_path, 1, Parallel(2), weights=True, dtype=DTYPE).model
    with open_checkpoint(str(tmp_path), None, "auto") as checkpoint:
        resolved = resolve(model, checkpoint).manifest
    assert resolved.unresolved["model.layers.0.self_attn.sinks"] == UNTOLD
    (piece,) = [p for p in resolved.pieces if p.name == "model.layers.1.self_attn.sinks"]
    assert piece.box == Box((4,), (4,))


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
    module = model.get_submodule("model.layers.0.self_attn.o_proj")
    wrapped = type("RowParallelLinearWithLoRA", (type(module),), {"__module__": "vllm.lora.layers.row"})
    monkeypatch.setattr(module, "__class__", wrapped)
    unresolved = resolve(model, checkpoint).manifest.unresolved
    assert list(unresolved) == ["model.layers.0.self_attn.o_proj.weight"]
    assert "LoRA" in unresolved["model.layers.0.self_attn.o_proj.weight"]
