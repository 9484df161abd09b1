"""Tiny random models of many architectures, and how their checkpoints are made: by transformers' own
`save_pretrained`, so that names and shapes are those of real checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weightsync_engine.resolve.offline import Parallel

COMMON: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TP = (Parallel(1), Parallel(2), Parallel(4))
EP = (Parallel(2, experts=True), Parallel(4, experts=True))
PP = (Parallel(2, pipeline=2),)
DP = (Parallel(2, data=2), Parallel(2, data=2, experts=True))
FULL = (*TP, *EP, *PP, *DP, Parallel(8), Parallel(8, experts=True), Parallel(2, 2, experts=True))
"""What the full matrix asks of every architecture that can."""


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str
    """As in `config.json`."""
    config: str
    """Class of transformers' configuration."""
    values: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    parallel: tuple[Parallel, ...] = TP
    impossible: tuple[Parallel, ...] = ()
    """Of the full matrix: what vLLM itself cannot do with a model so small."""
    by_loader: Mapping[str, str] = field(default_factory=dict)
    """What goes to vLLM's own loader: a pattern of names -> a pattern of the reason."""
    auto: str = "AutoModelForCausalLM"
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    def make(self, folder: Path, seed: int) -> Path:
        """A checkpoint folder with random values in every tensor."""
        import transformers

        config = getattr(transformers, self.config)(**self.values)
        config.architectures = [self.name]
        torch.manual_seed(seed)
        model = getattr(transformers, self.auto).from_config(config, dtype=self.dtype)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.normal_(0, 0.5)
        model.save_pretrained(folder)
        return folder


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
DEEPSEEK = COMMON | {
    "num_key_value_heads": 8, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_nextn_predict_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip

VISION = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip

ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "LlamaConfig", COMMON, parallel=TP + PP),
    Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        COMMON | {"tie_word_embeddings": True, "attention_bias": True},
        "tied, biases",
    ),
    Architecture("Qwen2ForCausalLM", "Qwen2Config", COMMON),
    Architecture(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 2},
        "tied, 2 KV heads",
        parallel=TP + PP,
    ),
    Architecture("Qwen3ForCausalLM", "Qwen3Config", COMMON | {"vocab_size": 1003}, "odd vocabulary"),
    Architecture("Qwen3ForCausalLM", "Qwen3Config", COMMON | {"tie_word_embeddings": True}, "tied"),
    Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", COMMON | MOE, parallel=TP + EP + PP + DP),
    Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        COMMON | {"num_local_experts": 6, "num_experts_per_tok": 2},
        "6 experts",
        parallel=(*TP, *EP, Parallel(8, experts=True)),
    ),
    Architecture("Gemma2ForCausalLM", "Gemma2Config", COMMON | {"tie_word_embeddings": True}),
    Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", COMMON | {"tie_word_embeddings": True}),
    Architecture("Phi3ForCausalLM", "Phi3Config", COMMON),
    Architecture(
        "Phi3ForCausalLM", "Phi3Config", COMMON | {"num_key_value_heads": 2}, "2 KV heads", parallel=TP[2:]
    ),
    Architecture(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "scoring_func": "softmax"},
        parallel=TP + EP,
    ),
    Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, parallel=TP + EP + DP[1:]),
    Architecture("MistralForCausalLM", "MistralConfig", COMMON, parallel=TP[1:2]),
    Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        COMMON | MOE | {"shared_expert_intermediate_size": 128},
        parallel=(TP[1], EP[0]),
    ),
    Architecture(
        "OlmoeForCausalLM",
        "OlmoeConfig",
        COMMON | {"num_experts": 8, "num_experts_per_tok": 2},
        parallel=(TP[1], EP[0]),
    ),
    Architecture(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        COMMON
        | {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1}
        | {"topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1},
        parallel=(TP[1], EP[0]),
        # A stage without experts, of which a model of two layers has one: "No Glm4MoE layer found".
        impossible=(*PP, Parallel(2, 2, experts=True)),
    ),
    Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        COMMON
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        parallel=TP + EP,
        impossible=(Parallel(8), Parallel(8, experts=True)),
        by_loader={
            r".*\.mlp\.experts\..*": "loaded by GptOssRoutedExperts, which is not known to copy plainly"
        },
    ),
    Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        COMMON
        | {
            "intermediate_size": 192,
            "intermediate_size_mlp": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        }
        | {"moe_layers": [1], "interleave_moe_layer_step": 2, "attention_chunk_size": 128},
        parallel=TP[:2],
        by_loader={
            r".*\.experts\.(gate_up|down)_proj": r"would be a share of \[",
            r".*\.self_attn\.[qkv]_proj\.weight": "whose rows the model permutes",
        },
    ),
    Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": 1000, "hidden_size": 128, "state_size": 16, "num_hidden_layers": 2, "num_heads": 8}
        | {"head_dim": 32, "n_groups": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        parallel=TP[:2],
        # More workers than groups, and vLLM has no pipeline for it.
        impossible=(Parallel(4), Parallel(8), *PP),
        by_loader={
            r".*\.mixer\.A_log": "composed_loader",
            r".*\.mixer\.(D|dt_bias|norm\.weight)": "sharded_weight_loader",
        },
    ),
    Architecture(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        COMMON
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        | {"shared_expert_intermediate_size": 128, "linear_num_value_heads": 8, "linear_num_key_heads": 4}
        | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"layer_types": ["linear_attention", "full_attention"]},
        parallel=TP[:2],
        impossible=(Parallel(8),),  # more workers than experts
        by_loader={r".*\.linear_attn\.(dt_bias|A_log|conv1d\.weight)": "sharded_weight_loader"},
    ),
    Architecture(
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {
            "text_config": COMMON | {"model_type": "llama"},
            "vision_config": VISION,
            "image_token_id": 5,
            "scale_factor": 2,
            "tie_word_embeddings": False,
        },
        auto="AutoModelForImageTextToText",
        impossible=(*PP, Parallel(8)),
    ),
)
