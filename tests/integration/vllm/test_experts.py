"""A real vLLM worker of a mixture of experts in this process: a flip does what a fresh load would do, as far as
the tokens that it generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.test_worker import greedy, receive, rpc, worker

pytestmark = pytest.mark.timeout(1800)


def make_checkpoint(folder: Path, seed: int) -> Path:
    """As `tiny.make_checkpoint`, with four experts in each layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, initializer_range=0.5, dtype="float32",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("first"), 1)


@pytest.fixture(scope="module")
def llm(first: Path) -> Iterator[Any]:
    with serving.in_process(first) as llm:
        yield llm


def test_a_flip_of_experts_does_what_vllms_own_loader_would_do(llm: Any, first: Path, tmp_path: Path) -> None:
    second = make_checkpoint(tmp_path, 2)
    wanted = {folder: tiny.Reference(folder).greedy(tiny.PROMPT, 24) for folder in (first, second)}
    assert wanted[first] != wanted[second]
    assert greedy(llm, tiny.PROMPT, 24) == wanted[first]
    description = rpc(llm, "weightsync_describe")
    assert (description["problem"], description["unresolved"]) == ({}, {})
    receive(llm, second, "step-1", 1)
    answer = rpc(llm, "weightsync_flip", object_uid="uid", epoch=1, round=1, version="step-1")
    assert (answer["version"], answer["torn"], answer["problem"]) == ("step-1", False, {})
    assert greedy(llm, tiny.PROMPT, 24) == wanted[second]
    manifest = worker(llm).weight_transfer_engine.resolved.manifest
    assert {p.tensor for p in manifest.pieces if ".experts." in p.name} == {
        f"model.layers.{layer}.mlp.experts.routed_experts.{w}_weight"
        for layer in (0, 1)
        for w in ("w13", "w2")
    }
