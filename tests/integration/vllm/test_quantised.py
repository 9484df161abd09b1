"""A real vLLM worker that quantises its weights as it loads them: after a flip it generates what a fresh server of the
new weights generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.test_worker import greedy, receive, rpc

pytestmark = pytest.mark.timeout(1800)
SERVED: dict[str, Any] = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}


def checkpoint(folder: Path, seed: int) -> Path:
    tiny.make_checkpoint(folder, seed, tied=True)
    values = {name: tensor.bfloat16() for name, tensor in tiny.load(folder).items()}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_flip_of_quantised_weights_generates_what_a_fresh_server_does_and_goes_back(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "1", 1), checkpoint(tmp_path / "2", 2)
    with serving.in_process(second, **SERVED) as llm:
        wanted = {second: greedy(llm, tiny.PROMPT, 16)}
    with serving.in_process(first, **SERVED) as llm:
        wanted[first] = greedy(llm, tiny.PROMPT, 16)
        assert wanted[first] != wanted[second]
        description = rpc(llm, "weightsync_describe")
        assert (description["problem"], description["unresolved"]) == ({}, {})
        model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()
        assert sum(p.dtype == torch.float8_e4m3fn for p in model.parameters()) == 8
        for round_, folder in enumerate((second, first, second), start=1):
            receive(llm, folder, f"step-{round_}", round_)
            answer = rpc(
                llm, "weightsync_flip", object_uid="uid", epoch=1, round=round_, version=f"step-{round_}"
            )
            assert (answer["version"], answer["torn"], answer["problem"]) == (f"step-{round_}", False, {})
            assert greedy(llm, tiny.PROMPT, 16) == wanted[folder]
