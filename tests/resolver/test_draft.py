"""C27: a draft model (speculative decoding) beside the target, against vLLM's own load of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.resolver.drafts import LAYERS, architecture, eagle, with_mtp
from tests.resolver.matrix import (
    DTYPE,
    TRAINERS,
    Moved,
    bits,
    everything,
    load,
    move_values,
    resolved_as,
    sharded,
)

from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import Plan
from weightsync_engine.plan.steps import PlanError
from weightsync_engine.resolve.offline import Parallel, build_worker

pytestmark = pytest.mark.timeout(300)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
DRAFT = f"model.layers.{LAYERS}."
PARALLEL = [Parallel(1), Parallel(2)]


def equals_a_fresh_load(moved: Moved, rank: int, parallel: Parallel, folder: Path, draft: Mapping[str, Any]) -> None:
    fresh = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE, speculative_config=dict(draft))
    wanted = dict(everything(fresh))
    assert wanted.keys() == moved.after.keys()
    assert any(name.startswith("draft.") for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"
        changed = not torch.equal(bits(moved.before[name]), bits(tensor))
        assert changed or tensor.dtype == torch.int32 or "rotary" in name or "scale" in name, f"never changed: {name}"


@pytest.mark.parametrize("parallel", [*PARALLEL, Parallel(2, experts=True)], ids=str)
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_the_layers_of_a_draft_model_are_written_to_the_draft_model(
    tmp_path: Path, name: str, parallel: Parallel
) -> None:
    first, second = with_mtp(tmp_path / "1", 1, name), with_mtp(tmp_path / "2", 2, name)
    plans: list[Plan] = []
    moved = move_values(first, parallel, [load(second)], plans.append, speculative_config=MTP)
    for rank, one in enumerate(moved):
        manifest = one.resolved.manifest
        assert manifest.unresolved == {}
        assert f"{DRAFT}eh_proj.weight" in manifest.draft and f"{DRAFT}self_attn.q_a_proj.weight" in manifest.draft or (
            name != "DeepseekV3ForCausalLM"
        )
        # vLLM shares the target's embedding and head: they are written once, and the layer's own copies are nobody's.
        assert manifest.unused == {f"{DRAFT}embed_tokens.weight", f"{DRAFT}shared_head.head.weight"}
        assert one.resolved.doubles == ()
        equals_a_fresh_load(one, rank, parallel, second, MTP)
    (plan,) = plans
    assert len([r for r in plan.routes if r.source.name == "model.embed_tokens.weight"]) == 1


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_a_draft_model_with_a_checkpoint_of_its_own_is_sent_under_a_prefix(tmp_path: Path, parallel: Parallel) -> None:
    llama = architecture("LlamaForCausalLM")
    folders = [llama.make(tmp_path / str(seed), seed) for seed in (1, 2)]
    heads = [eagle(tmp_path / f"eagle-{seed}", seed + 10, folders[0]) for seed in (1, 2)]
    said = [
        {"method": "eagle", "model": str(head), "num_speculative_tokens": 1, "draft_tensor_parallel_size": parallel.tensor}
        for head in heads
    ]
    sent = load(folders[1]) | {f"draft.{name}": tensor for name, tensor in load(heads[1]).items()}
    for rank, one in enumerate(move_values(folders[0], parallel, [sent], speculative_config=said[0])):
        manifest = one.resolved.manifest
        assert manifest.unresolved == {} and manifest.unused == frozenset()
        assert manifest.draft == {f"draft.{name}" for name in load(heads[1])}
        equals_a_fresh_load(one, rank, parallel, folders[1], said[1])


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_what_target_and_draft_model_both_hold_travels_once_and_is_written_twice(
    tmp_path: Path, parallel: Parallel
) -> None:
    llama = architecture("LlamaForCausalLM")
    first, second = llama.make(tmp_path / "1", 1), llama.make(tmp_path / "2", 2)

    def drafted_by_itself(folder: Path) -> dict[str, Any]:
        return {
            "method": "draft_model",
            "model": str(folder),
            "num_speculative_tokens": 1,
            "draft_tensor_parallel_size": parallel.tensor,
        }

    plans: list[Plan] = []
    more: dict[str, Any] = {"speculative_config": drafted_by_itself(first)}
    moved = move_values(first, parallel, [load(second)], plans.append, **more)
    alone: list[Plan] = []
    move_values(first, parallel, [load(second)], alone.append)
    assert (plans[0].bytes_received, plans[0].steps) == (alone[0].bytes_received, alone[0].steps)
    for rank, one in enumerate(moved):
        assert one.resolved.manifest.unresolved == {} and one.resolved.manifest.draft == frozenset()
        assert len(one.resolved.doubles) == len(one.resolved.manifest.pieces)
        equals_a_fresh_load(one, rank, parallel, second, drafted_by_itself(second))
