"""A real vLLM worker whose experts go through vLLM's own loader: after a flip it generates what a fresh load would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.test_worker import greedy, receive, rpc

pytestmark = pytest.mark.timeout(1800)


def make_checkpoint(folder: Path, seed: int) -> Path:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(seed)
    config = Llama4TextConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=96, intermediate_size_mlp=128,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
        num_local_experts=4, num_experts_per_tok=1, moe_layers=[1], interleave_moe_layer_step=2,
        attention_chunk_size=128, bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.5,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    config.architectures = ["Llama4ForCausalLM"]
    model = Llama4ForCausalLM(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(0, 0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("first"), 1)


@pytest.fixture(scope="module")
def llm(first: Path) -> Iterator[Any]:
    with serving.in_process(first) as llm:
        yield llm


def test_a_flip_through_vllms_loader_generates_what_was_sent_and_goes_back(
    llm: Any, first: Path, tmp_path: Path
) -> None:
    description = rpc(llm, "weightsync_describe")
    assert (description["problem"], description["unresolved"]) == ({}, {})
    second = make_checkpoint(tmp_path, 2)
    wanted = {folder: tiny.Reference(folder).greedy(tiny.PROMPT, 24) for folder in (first, second)}
    assert wanted[first] != wanted[second]
    assert greedy(llm, tiny.PROMPT, 24) == wanted[first]
    for round_, folder in enumerate((second, first, second), start=1):
        receive(llm, folder, f"step-{round_}", round_)
        answer = rpc(
            llm, "weightsync_flip", object_uid="uid", epoch=1, round=round_, version=f"step-{round_}"
        )
        assert (answer["version"], answer["torn"], answer["problem"]) == (f"step-{round_}", False, {})
        assert greedy(llm, tiny.PROMPT, 24) == wanted[folder]
