"""A tiny random Qwen3: `python model.py DIR` writes the checkpoint that both sides of the demo start from.

float32, because on the CPU only float32 gives the same greedy tokens in vLLM and in transformers; head_dim 32,
because vLLM's CPU attention supports few sizes. The seed makes every pod's copy equal.
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def build(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config()).to(torch.float32)


if __name__ == "__main__":
    model = build()
    model.save_pretrained(sys.argv[1])
    print(f"wrote a Qwen3 of {sum(p.numel() for p in model.parameters()):,} parameters to {sys.argv[1]}")
