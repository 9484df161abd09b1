"""A tiny random model of each of transformers' families, in float32, and which of them can travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DENSE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}
_DEEPSEEK: dict[str, Any] = dict(
    {k: v for k, v in _DENSE.items() if k not in ("head_dim", "num_key_value_heads")},
    num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    n_group=2, topk_group=1,
)  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "num_heads": 2,
    "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _model(config: str, model: str, **values: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**values)).to(torch.float32)
        torch.manual_seed(0)
        with torch.no_grad():
            for tensor in made.state_dict().values():  # ones and zeros would hide a mix-up
                tensor.normal_()
        return made

    return make


def _vision(config: str, model: str, text: dict[str, Any], vision: dict[str, Any]) -> Callable[[], Any]:
    return _model(config, model, text_config=text, vision_config=vision)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _model("LlamaConfig", "LlamaForCausalLM", **_DENSE),
    "llama tied": _model("LlamaConfig", "LlamaForCausalLM", **_DENSE, tie_word_embeddings=True),
    "qwen2": _model("Qwen2Config", "Qwen2ForCausalLM", **_DENSE),
    "qwen3": _model("Qwen3Config", "Qwen3ForCausalLM", **_DENSE),
    "phi3": _model("Phi3Config", "Phi3ForCausalLM", **_DENSE),
    "gemma2": _model("Gemma2Config", "Gemma2ForCausalLM", **_DENSE),
    "gemma3 text": _model("Gemma3TextConfig", "Gemma3ForCausalLM", **_DENSE),
    "qwen3-moe": _model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_DENSE, **_MOE),
    "mixtral": _model("MixtralConfig", "MixtralForCausalLM", **_DENSE, num_local_experts=4),
    "deepseek-v2": _model("DeepseekV2Config", "DeepseekV2ForCausalLM", **_DEEPSEEK),
    "deepseek-v3": _model("DeepseekV3Config", "DeepseekV3ForCausalLM", **_DEEPSEEK),
    "gpt-oss": _model("GptOssConfig", "GptOssForCausalLM", **_DENSE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2.5-vl": _vision(
        "Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration",
        {**_DENSE, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        {**_VISION, "fullatt_block_indexes": [0], "window_size": 16},
    ),
    "qwen3-vl": _vision(
        "Qwen3VLConfig", "Qwen3VLForConditionalGeneration",
        {**_DENSE, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    "gemma3 with vision": _vision(
        "Gemma3Config", "Gemma3ForConditionalGeneration", _DENSE,
        {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
             "patch_size": 4},
    ),
}  # fmt: skip


def qwen3_vl_moe() -> Any:
    """Its live experts are transposed against its published checkpoints."""
    text = {**_DENSE, **_MOE, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return _vision("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", text, vision)()
