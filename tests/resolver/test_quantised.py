"""Weights that vLLM quantises as it loads them: the trainer's are whole and unquantised, and vLLM's layerwise reload
makes of them, in the live memory, bit for bit what a fresh load makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.resolver.matrix import Folders, bits, fill, flip, load, resolved_as, tensors
from tests.resolver.models import ARCHITECTURES, DEEPSEEK, Architecture
from torch import nn

from weightsync_engine.mover.slab import Slab
from weightsync_engine.resolve.loader import held_by
from weightsync_engine.resolve.offline import OfflineError, OfflineWorker, build_worker
from weightsync_engine.vllm.shadow import Shadow

METHOD = "fp8_per_channel"
"""The one that vLLM's CPU build has all kernels for."""
DENSE = tuple(
    replace(a, dtype=torch.bfloat16)
    for a in (
        *(a for a in ARCHITECTURES if a.name in ("LlamaForCausalLM", "Qwen3ForCausalLM") and a.note),
        *(a for a in ARCHITECTURES if a.name in ("Qwen2ForCausalLM", "Gemma3ForCausalLM")),
        Architecture(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            DEEPSEEK | {"first_k_dense_replace": 2},
            "MLA, no experts",
        ),
    )
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantised"))


def quantised(folder: Path, method: str = METHOD) -> OfflineWorker:
    return build_worker(folder, weights=True, dtype="bfloat16", quantization=method)


def everything(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, and what layers and their kernels keep beside them."""
    yield from tensors(model)
    for path, module in model.named_modules():
        yield from ((f"{path}.{name}", tensor) for name, tensor in held_by(module))


@pytest.mark.parametrize("architecture", DENSE, ids=lambda a: a.title)
def test_a_round_leaves_what_a_fresh_quantised_load_leaves_in_the_same_memory(
    folders: Folders, architecture: Architecture
) -> None:
    # C04, C28
    first, *rounds = (folders(architecture, seed) for seed in (1, 2, 3, 1))
    worker = quantised(first)
    before = {name: tensor.detach().clone() for name, tensor in everything(worker.model)}
    where = {name: tensor.data_ptr() for name, tensor in everything(worker.model)}
    resolved = resolved_as(worker, first)
    manifest = resolved.manifest
    assert manifest.unresolved == {}
    kept = {name for name, t in tensors(worker.model) if t.dtype == torch.float8_e4m3fn}
    assert len(kept) >= 8
    assert set(manifest.fallback) == {n for n in manifest.expected if "_proj" in n}
    assert {
        "Fp8PtpcOnlineLinearMethod" in why or "computed W_U" in why for why in manifest.fallback.values()
    } == {True}
    ((loader, _),) = resolved.loaders
    reloaded = {worker.model.get_submodule(p) for group in loader.groups for p in group.modules}
    derived = {module for module in worker.model.modules() if "W_UV" in module._parameters}
    assert bool(derived) == ("MLA" in architecture.title)
    assert reloaded == {worker.model.get_submodule(name.removesuffix(".weight")) for name in kept} | derived
    for name, tensor in everything(worker.model):
        assert torch.equal(bits(tensor), bits(before[name])), f"{name}: the trial changed it"
    shadow = Shadow(resolved, Slab.create(resolved.slab_bytes))
    for number, folder in enumerate(rounds, start=1):
        shadow.slab.begin_write()
        fill(resolved, shadow.slab, load(folder))
        flip(worker, shadow, number)
        fresh = dict(everything(quantised(folder).model))
        live = dict(everything(worker.model))
        assert live.keys() == fresh.keys()
        for name, tensor in fresh.items():
            assert torch.equal(bits(live[name]), bits(tensor)), f"round {number}: {name}"
            if not name.endswith("_scale_cpu"):  # of a KV cache that has no scales: 1.0, for the host
                assert live[name].data_ptr() == where[name], f"round {number}: {name} is elsewhere"


def test_a_checkpoint_that_is_quantised_itself_is_refused_with_what_to_serve_instead(
    folders: Folders, tmp_path: Path
) -> None:
    # C16
    import json

    from safetensors.torch import save_file

    folder = folders(DENSE[0], 1)
    values = load(folder)
    linear = {n for n in values if n.endswith("_proj.weight")}
    eights = {n: t.to(torch.float8_e4m3fn) if n in linear else t for n, t in values.items()}
    eights |= {n.replace(".weight", ".weight_scale"): torch.ones(len(values[n]), 1) for n in linear}
    save_file(eights, tmp_path / "model.safetensors")
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel"},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    worker = build_worker(tmp_path, weights=True, dtype="bfloat16")
    manifest = resolved_as(worker, tmp_path).manifest
    assert manifest.fallback == {}
    why = manifest.unresolved["model.layers.0.self_attn.q_proj.weight"]
    assert "CompressedTensorsLinearMethod" in why and "a trainer's are not" in why and "--quantization" in why
    assert "model.embed_tokens.weight" in manifest.expected


def test_experts_that_are_quantised_cannot_be_built_here_and_are_left_to_the_trial_elsewhere(
    folders: Folders,
) -> None:
    """vLLM's CPU build has no kernel for them: what is known is only that they are not written directly."""
    from weightsync_engine.resolve.experts import other_form

    moe = next(a for a in ARCHITECTURES if a.name == "Qwen3MoeForCausalLM")
    with pytest.raises(OfflineError, match="MoE backend"):
        quantised(folders(moe, 1), "int8_per_channel_weight_only")
    online: Any = type("Fp8PtpcOnlineMoEMethod", (), {"uses_meta_device": True})
    offline: Any = type("CompressedTensorsMoEMethod", (), {})
    assert other_form("experts", online(), "m.experts").rerun is not None
    assert other_form("experts", offline(), "m.experts").rerun is None
