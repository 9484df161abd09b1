"""Names and stacking of transformers' models, against what `save_pretrained` writes."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.families import FAMILIES, qwen3_vl_moe
from torch import nn

from weightsync_engine.layout.tensors import SourceParameter
from weightsync_engine.trainer import PublishError, checkpoint_names
from weightsync_engine.trainer.merge import merge
from weightsync_engine.trainer.sources import Held, Sources, checkpoint_rules

pytestmark = pytest.mark.timeout(600)  # the first import of transformers' models takes a while


def sent(model: Any, **options: Any) -> tuple[dict[str, Held], dict[str, SourceParameter], dict[str, str]]:
    """The trainer's tensors, the checkpoint parameters in them, and the aliases."""
    sources = Sources(model, **options)
    held = sources.held()
    merged = merge([[h.describe() for h in held]])
    return {h.name: h for h in held}, {s.name: s for s in merged}, sources.aliases


def value(held: dict[str, Held], source: SourceParameter) -> torch.Tensor:
    region, tensor = source.region, held[source.tensor].local
    for dim, (start, extent) in enumerate(zip(region.start, region.shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor.reshape(source.shape)


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_equal(model: Any, file: dict[str, torch.Tensor], **options: Any) -> dict[str, SourceParameter]:
    held, sources, aliases = sent(model, **options)
    assert set(file) <= set(sources) | set(aliases), "in the checkpoint, but not sent"
    assert set(sources) <= set(file) | {a for a, name in aliases.items()} | {aliases[a] for a in aliases}
    for name, tensor in file.items():
        source = sources[aliases.get(name, name)]
        assert source.shape == tuple(tensor.shape), name
        assert torch.equal(value(held, source).detach(), tensor), name
    return sources


@pytest.mark.parametrize("family", FAMILIES)
def test_every_checkpoint_tensor_is_the_region_that_the_rules_name(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family]()
    assert_equal(model, saved(model, tmp_path))


@pytest.mark.parametrize(
    "family", ["qwen3-moe", "mixtral", "deepseek-v3", "qwen2.5-vl", "gemma3 with vision"]
)
def test_a_model_that_was_loaded_is_named_as_its_checkpoint(family: str, tmp_path: Path) -> None:
    first = FAMILIES[family]()
    file = saved(first, tmp_path)
    model = type(first).from_pretrained(tmp_path)
    assert_equal(model, file)


def test_stacked_experts_become_one_parameter_per_expert_without_a_copy() -> None:
    held, sources, _ = sent(FAMILIES["qwen3-moe"]())
    stacked = next(h for n, h in held.items() if n.startswith("model.layers.1.mlp.experts.gate_up_proj"))
    assert stacked.tensor.shape == (4, 48, 32) and stacked.parts is not None and len(stacked.parts) == 8
    up = sources["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert (up.shape, up.tensor, up.tensor_shape) == ((24, 32), stacked.name, (4, 48, 32))
    assert up.within is not None and up.within.at == (3, 24, 0)
    assert value(held, up).data_ptr() == stacked.local[3, 24:].data_ptr()


def test_gpt_oss_travels_as_it_is() -> None:
    """Its checkpoint's experts are stacked and interleaved as the live ones are."""
    held, sources, _ = sent(FAMILIES["gpt-oss"]())
    assert "model.layers.0.mlp.experts.gate_up_proj" in sources and all(
        h.parts is None for h in held.values()
    )


def test_what_is_transposed_in_the_checkpoint_is_refused_by_name() -> None:
    with pytest.raises(PublishError) as error:
        Sources(qwen3_vl_moe()).held()
    assert "experts.down_proj'" in str(error.value) or "experts.gate_up_proj'" in str(error.value)
    assert "transposed" in str(error.value) and "`names`" in str(error.value)


def test_what_is_refused_can_be_named_or_left_out_by_the_user() -> None:
    model = qwen3_vl_moe()
    experts = {n: None for n, _ in model.named_parameters() if "experts" in n}
    held, _, _ = sent(model, names=experts)
    assert held and not [n for n in held if "experts" in n]


def test_all_of_deepseek_v3_is_named_in_seconds() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    started = time.process_time()
    rules = checkpoint_rules(model, shapes)
    assert time.process_time() - started < 10
    names = [p.name for rule in rules.values() if isinstance(rule, tuple) for p in rule]
    experts = [f"model.layers.{i}.mlp.experts.{e}." for i in range(3, 61) for e in range(256)]
    assert sorted(names) == sorted(e + f"{n}_proj.weight" for e in experts for n in ("gate", "up", "down"))


# ---- around the model --------------------------------------------------------------------------------------


class Actor(nn.Module):
    """A trainer's own module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.actor = model
        self.value_head = nn.Linear(4, 1)


def test_wrappers_around_a_model_do_not_show_in_the_names(tmp_path: Path) -> None:
    model = FAMILIES["qwen3-moe"]()
    file = saved(model, tmp_path)
    assert_equal(torch.compile(model), file)
    inner = {"value_head.weight": None, "value_head.bias": None}
    assert_equal(Actor(model), file, names=inner)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert_equal(model, file)


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "in some layers, one of them saved whole": (
        "qwen3",
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "modules_to_save": ["lm_head"]},
    ),
    "with magnitudes, the embedding among them": (
        "qwen3",
        {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    ),
    "of two stacked parameters of one module": (
        "qwen3-moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_peft_do_not_show_once_they_are_merged_and_are_refused_before(
    kind: str, tmp_path: Path
) -> None:
    # C26
    from peft import LoraConfig, get_peft_model

    family, values = ADAPTERS[kind]
    model = get_peft_model(FAMILIES[family](), LoraConfig(r=2, init_lora_weights=False, **values))
    with pytest.raises(PublishError, match="merge it before publishing"):
        Sources(model).held()
    file = saved(copy.deepcopy(model).merge_and_unload(), tmp_path)
    model.merge_adapter()
    assert_equal(model, file)
    model.unmerge_adapter()
    with pytest.raises(PublishError, match="merge it before publishing"):
        Sources(model).held()


def test_a_pipeline_stage_names_what_it_has(tmp_path: Path) -> None:
    model = FAMILIES["deepseek-v3"]()
    file = saved(model, tmp_path)
    del model.model.layers[0]  # shifts the others, as careless stages do; names follow the live ones
    model.lm_head = nn.Identity()
    _, sources, _ = sent(model)
    shifted = {n.replace("layers.1.", "layers.0."): t for n, t in file.items() if "layers.1." in n}
    assert set(shifted) < set(sources) and "lm_head.weight" not in sources


def test_two_models_in_one_module_are_refused_with_their_names() -> None:
    both = nn.ModuleDict({"actor": FAMILIES["qwen3"](), "critic": FAMILIES["qwen3"]()})
    with pytest.raises(PublishError, match="2 transformers models \\(actor, critic\\)"):
        Sources(both).held()


def test_the_rules_can_be_called_from_the_users_own_function(tmp_path: Path) -> None:
    model = FAMILIES["mixtral"]()
    file = saved(model, tmp_path)
    rules = checkpoint_names(model)
    _, sources, _ = sent(model, names=lambda n: None if n == "lm_head.weight" else rules(n))
    assert set(sources) == set(file) - {"lm_head.weight"}
    with pytest.raises(PublishError, match="no tensor called 'x'"):
        rules("x")


def test_a_quantised_model_is_refused() -> None:
    model = FAMILIES["qwen3"]()
    model.hf_quantizer = type("Q", (), {"quantization_config": None})()
    with pytest.raises(PublishError, match="quantised"):
        Sources(model).held()


def test_the_wire_dtype_goes_by_checkpoint_name_or_by_the_trainers() -> None:
    model = FAMILIES["deepseek-v3"]()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    gate = "model.layers.1.mlp.experts.0.gate_proj.weight"
    _, sources, _ = sent(model, dtype=lambda n, t: None if n == bias else torch.bfloat16)
    assert (sources[bias].dtype, sources[gate].dtype) == ("float32", "bfloat16")
    _, sources, _ = sent(model, dtype={stacked: torch.bfloat16})
    assert sources[gate].dtype == "bfloat16"
    assert sources["model.layers.1.mlp.experts.0.down_proj.weight"].dtype == "float32"
    with pytest.raises(PublishError, match="stacked in one tensor travels in one dtype"):
        sent(model, dtype={gate: torch.bfloat16})
