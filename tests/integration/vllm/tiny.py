"""A tiny random Qwen3 that vLLM's CPU build can serve, its checkpoints, and what transformers makes of
them."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 1000
PROMPT = [1, 17, 233, 42, 5, 999, 310, 8]


def make_checkpoint(
    folder: Path, seed: int, *, tied: bool, kv_heads: int = 4, dtype: str = "float32"
) -> Path:
    """A checkpoint folder: config and safetensors. The seed decides the weights. No tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=tied, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.5, dtype=dtype,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # So that greedy tokens vary, instead of one token for ever.
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "proj" in name:
                parameter.mul_(3)
            elif "embed" in name:
                parameter.mul_(0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def load(folder: Path) -> dict[str, torch.Tensor]:
    """Checkpoint name -> tensor."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


class Reference:
    """What transformers generates from a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The next `tokens` greedy token ids."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        return out[0, len(prompt) :].tolist()
