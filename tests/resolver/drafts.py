"""Tiny checkpoints of models with a draft model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.resolver.matrix import load
from tests.resolver.models import ARCHITECTURES, Architecture

LAYERS = 2
"""Of the target; the layer after them is the draft model's."""


def architecture(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name and not a.note)


def with_mtp(folder: Path, seed: int, of: str | Architecture = "DeepseekV3ForCausalLM") -> Path:
    """A model as it is published: with one more layer, for a draft model that predicts the token after the next. That
    layer brings copies of the embedding and the head."""
    (architecture(of) if isinstance(of, str) else of).make(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    values, width = load(folder), config["hidden_size"]
    dtype = values["lm_head.weight"].dtype
    last, draft = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    more = {n.replace(last, draft, 1): torch.randn_like(t) for n, t in values.items() if n.startswith(last)}
    more |= {
        f"{draft}eh_proj.weight": torch.randn(width, 2 * width, dtype=dtype),
        **{
            f"{draft}{norm}.weight": torch.randn(width, dtype=dtype)
            for norm in ("enorm", "hnorm", "shared_head.norm")
        },
        f"{draft}embed_tokens.weight": values["model.embed_tokens.weight"].clone(),
        f"{draft}shared_head.head.weight": values["lm_head.weight"].clone(),
    }
    save_file(values | more, folder / "model.safetensors")
    return folder


def eagle(folder: Path, seed: int, target: Path) -> Path:
    """An EAGLE head for a Llama, without embedding and head: it uses the target's."""
    architecture("LlamaForCausalLM").make(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    values, width = load(folder), config["hidden_size"]
    layer = "model.layers.0."
    kept = {n.removeprefix("model."): t for n, t in values.items() if n.startswith(layer)}
    del kept["layers.0.input_layernorm.weight"]  # it has none: `fc` makes what the layer begins with
    save_file(kept | {"fc.weight": torch.randn(width, 2 * width)}, folder / "model.safetensors")
    return folder
