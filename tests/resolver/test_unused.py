"""Names that a checkpoint has and vLLM's own load leaves out: a trainer may send them, and nobody takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.resolver.drafts import LAYERS, architecture, with_mtp
from tests.resolver.matrix import DTYPE, bits, load, move_server, resolved_as, tensors

from weightsync_engine.resolve.offline import Parallel, build_worker

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("parallel", [Parallel(1), Parallel(2, experts=True), Parallel(1, 2)], ids=str)
def test_the_layers_of_a_draft_model_are_left_out_where_none_runs(tmp_path: Path, parallel: Parallel) -> None:
    """C27: neither an error nor a transfer."""
    first, second = with_mtp(tmp_path / "1", 1), with_mtp(tmp_path / "2", 2)
    draft = {name for name in load(first) if name.startswith(f"model.layers.{LAYERS}.")}
    assert len(draft) > 6
    for rank, moved in enumerate(move_server(first, parallel, second)):
        assert moved.resolved.manifest.unresolved == {}
        assert moved.resolved.manifest.unused == draft
        fresh = dict(tensors(build_worker(second, rank, parallel, weights=True, dtype=DTYPE).model))
        for name, tensor in fresh.items():
            assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"


def test_what_another_worker_holds_is_not_called_unused(tmp_path: Path) -> None:
    folder = architecture("Qwen3MoeForCausalLM").make(tmp_path, 1)
    for parallel in (Parallel(2, experts=True), Parallel(1, 2), Parallel(1, data=2, experts=True)):
        for rank in range(parallel.workers):
            worker = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE)
            assert resolved_as(worker, folder).manifest.unused == frozenset(), (str(parallel), rank)
