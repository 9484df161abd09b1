"""Workers built offline: what they are, what is refused, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.resolver.matrix import DTYPE, Folders, resolved_as
from tests.resolver.models import ARCHITECTURES, COMMON

from weightsync_engine.resolve.checkpoint import open_checkpoint
from weightsync_engine.resolve.manifest import resolve
from weightsync_engine.resolve.offline import Group, OfflineError, Parallel, build_worker

LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def state() -> tuple[Any, ...]:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import utils

    groups = {n: v for n, v in vars(parallel_state).items() if n.startswith("_") and n[1:].isupper()}
    return (
        groups,
        dict(rotary_embedding._ROPE_DICT),
        dict(utils._model_to_pp_missing_layer_names),
        dict(os.environ),
        torch.get_default_dtype(),
        torch.get_default_device(),
        get_current_vllm_config_or_none(),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


def test_a_model_of_hundreds_of_layers_and_experts_is_laid_out_in_seconds() -> None:
    from transformers import DeepseekV3Config

    config = json.loads(DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]).to_json_string())
    config |= {"topk_method": "noaux_tc", "num_hidden_layers": 200}
    build_worker(config | {"num_hidden_layers": 4})  # imports
    started = time.perf_counter()
    worker = build_worker(config, 9, Parallel(8, 2, experts=True), dtype="bfloat16")
    resolved = resolve(worker.model, None, "planned", planned=True)
    assert time.perf_counter() - started < 60, "it takes 5 seconds on an idle core"
    assert resolved.manifest.unresolved == {}
    assert all(p.is_meta for p in worker.model.parameters())
    experts = {p.name for p in resolved.manifest.pieces if ".experts." in p.name}
    assert {int(name.split(".")[5]) for name in experts} == set(range(32, 64)), "those of worker 1 of stage 1"
    assert {int(name.split(".")[2]) for name in experts} == set(range(100, 200))


def test_a_planned_layout_is_the_one_that_a_loaded_model_has(folders: Folders) -> None:
    for architecture in ARCHITECTURES:
        folder = folders(architecture, 1)
        for parallel in architecture.parallel:
            rank = parallel.workers - 1
            with open_checkpoint(str(folder), None, "auto") as checkpoint:
                planned = resolve(
                    build_worker(folder, rank, parallel, dtype=DTYPE).model, checkpoint, planned=True
                )
            loaded = resolved_as(build_worker(folder, rank, parallel, weights=True, dtype=DTYPE), folder)
            assert planned.manifest == loaded.manifest, f"{architecture.title}, {parallel}"
            assert planned.direct_bytes == loaded.direct_bytes
            assert planned.loader_bytes == loaded.loader_bytes


def test_without_a_checkpoint_the_names_are_those_that_transformers_saves(folders: Folders) -> None:
    for architecture in ARCHITECTURES:
        if architecture.by_loader:
            continue
        folder = folders(architecture, 1)
        model = build_worker(folder, 0, dtype=DTYPE).model
        with open_checkpoint(str(folder), None, "auto") as checkpoint:
            known = resolve(model, checkpoint, planned=True).manifest
        guessed = resolve(model, None, "planned", planned=True).manifest
        assert guessed.expected == known.expected, architecture.title
        assert set(guessed.pieces) == set(known.pieces), architecture.title


def test_nothing_of_a_worker_stays_behind_in_the_process() -> None:
    before = state()
    build_worker(LLAMA, 1, Parallel(2))
    assert state() == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        (LLAMA | {"num_attention_heads": 6, "head_dim": 64, "num_key_value_heads": 6}, "6"),
    ],
    ids=["unknown-architecture", "heads-that-do-not-divide"],
)
def test_a_model_that_vllm_refuses_is_told_with_its_words_and_changes_nothing(
    config: dict[str, Any], said: str
) -> None:
    before = state()
    with pytest.raises(OfflineError, match=said) as told:
        build_worker(config, 3, Parallel(4))
    assert "TP 4" in str(told.value)
    assert state() == before


@pytest.mark.parametrize(
    ("model", "rank", "parallel", "weights", "said"),
    [
        (LLAMA, 4, Parallel(4), False, "none of the 4 workers"),
        (LLAMA, 0, Parallel(0), False, "at least 1"),
        (LLAMA, 0, Parallel(1), True, "from a folder"),
        ("nowhere", 0, Parallel(1), False, "no config.json"),
    ],
)
def test_wrong_arguments_are_told(
    model: Any, rank: int, parallel: Parallel, weights: bool, said: str
) -> None:
    with pytest.raises(OfflineError, match=said):
        build_worker(model, rank, parallel, weights=weights)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(OfflineError, match="Cannot find any model weights"):
        build_worker(tmp_path, weights=True)


def test_a_process_in_which_vllm_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    served = object()
    monkeypatch.setattr(parallel_state, "_TP", served)
    with pytest.raises(OfflineError, match="process of its own"):
        build_worker(LLAMA)
    assert parallel_state._TP is served


def test_a_stand_in_group_never_pretends_to_communicate() -> None:
    group = Group("tp", [0, 1], 1)
    for call in (group.barrier, lambda: group.all_reduce(torch.ones(1)), lambda: group.broadcast(1)):
        with pytest.raises(OfflineError, match="'tp'"):
            call()
    alone = torch.ones(1)
    assert Group("tp", [3], 3).all_reduce(alone) is alone
