"""Names that a checkpoint has and vLLM's own load leaves out: a trainer may send them, and nobody takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.resolver.matrix import DTYPE, bits, load, move_server, resolved_as, tensors
from tests.resolver.models import ARCHITECTURES

from weightsync_engine.resolve.offline import Parallel, build_worker

pytestmark = pytest.mark.timeout(300)
LAYERS = 2
DRAFT = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "embed_tokens.weight", "shared_head.head.weight")


def with_draft(folder: Path, seed: int) -> Path:
    """DeepSeek-V3 as it is published: one more layer than the model has, for a draft model (MTP)."""
    (architecture,) = (a for a in ARCHITECTURES if a.name == "DeepseekV3ForCausalLM")
    architecture.make(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    values = load(folder)
    last = {n: t for n, t in values.items() if n.startswith(f"model.layers.{LAYERS - 1}.")}
    draft = {n.replace(f".{LAYERS - 1}.", f".{LAYERS}.", 1): torch.randn_like(t) for n, t in last.items()}
    draft |= {f"model.layers.{LAYERS}.{n}": torch.randn(16, 16) for n in DRAFT}
    save_file(values | draft, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("parallel", [Parallel(1), Parallel(2, experts=True), Parallel(1, 2)], ids=str)
def test_the_layers_of_a_draft_model_are_left_out_where_none_runs(tmp_path: Path, parallel: Parallel) -> None:
    """C27: neither an error nor a transfer."""
    first, second = with_draft(tmp_path / "1", 1), with_draft(tmp_path / "2", 2)
    draft = {name for name in load(first) if name.startswith(f"model.layers.{LAYERS}.")}
    assert len(draft) > len(DRAFT)
    for rank, moved in enumerate(move_server(first, parallel, second)):
        assert moved.resolved.manifest.unresolved == {}
        assert moved.resolved.manifest.unused == draft
        fresh = dict(tensors(build_worker(second, rank, parallel, weights=True, dtype=DTYPE).model))
        for name, tensor in fresh.items():
            assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"


def test_what_another_worker_holds_is_not_called_unused(tmp_path: Path) -> None:
    (architecture,) = (a for a in ARCHITECTURES if a.name == "Qwen3MoeForCausalLM")
    folder = architecture.make(tmp_path, 1)
    for parallel in (Parallel(2, experts=True), Parallel(1, 2), Parallel(1, data=2, experts=True)):
        for rank in range(parallel.workers):
            worker = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE)
            assert resolved_as(worker, folder).manifest.unused == frozenset(), (str(parallel), rank)
