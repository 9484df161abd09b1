"""C27: a draft model (speculative decoding) beside the target, against vLLM's own load of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.resolver.drafts import LAYERS, architecture, eagle, with_mtp
from tests.resolver.matrix import (
    DTYPE,
    TRAINERS,
    Moved,
    bits,
    everything,
    fill,
    flip,
    load,
    move_values,
    resolved_as,
    sharded,
)
from tests.resolver.models import DEEPSEEK, Architecture

from weightsync_engine.mover.slab import Slab
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import Plan
from weightsync_engine.plan.steps import PlanError
from weightsync_engine.resolve.checkpoint import open_checkpoint
from weightsync_engine.resolve.draft import draft_of, with_draft
from weightsync_engine.resolve.loader import held_by
from weightsync_engine.resolve.manifest import resolve
from weightsync_engine.resolve.offline import OfflineWorker, Parallel, build_worker
from weightsync_engine.vllm.shadow import Shadow

pytestmark = pytest.mark.timeout(300)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
DRAFT = f"model.layers.{LAYERS}."
PARALLEL = [Parallel(1), Parallel(2)]


def equals_a_fresh_load(
    moved: Moved, rank: int, parallel: Parallel, folder: Path, draft: Mapping[str, Any]
) -> None:
    fresh = build_worker(folder, rank, parallel, weights=True, dtype=DTYPE, speculative_config=dict(draft))
    wanted = dict(everything(fresh))
    assert wanted.keys() == moved.after.keys()
    assert any(name.startswith("draft.") for name in wanted)
    for name, tensor in wanted.items():
        assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"
        changed = not torch.equal(bits(moved.before[name]), bits(tensor))
        assert changed or tensor.dtype == torch.int32 or "rotary" in name or "scale" in name, (
            f"never changed: {name}"
        )


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
        assert (
            f"{DRAFT}eh_proj.weight" in manifest.draft
            and f"{DRAFT}self_attn.q_a_proj.weight" in manifest.draft
        ) or (name != "DeepseekV3ForCausalLM")
        # vLLM shares the target's embedding and head: they are written once, and the layer's own copies are nobody's.
        assert manifest.unused == {f"{DRAFT}embed_tokens.weight", f"{DRAFT}shared_head.head.weight"}
        assert one.resolved.doubles == ()
        equals_a_fresh_load(one, rank, parallel, second, MTP)
    (plan,) = plans
    assert len([r for r in plan.routes if r.source.name == "model.embed_tokens.weight"]) == 1


@pytest.mark.parametrize("parallel", PARALLEL, ids=str)
def test_a_draft_model_with_a_checkpoint_of_its_own_is_sent_under_a_prefix(
    tmp_path: Path, parallel: Parallel
) -> None:
    llama = architecture("LlamaForCausalLM")
    folders = [llama.make(tmp_path / str(seed), seed) for seed in (1, 2)]
    heads = [eagle(tmp_path / f"eagle-{seed}", seed + 10, folders[0]) for seed in (1, 2)]
    said = [
        {
            "method": "eagle",
            "model": str(head),
            "num_speculative_tokens": 1,
            "draft_tensor_parallel_size": parallel.tensor,
        }
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
        return by_itself(folder, draft_tensor_parallel_size=parallel.tensor)

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


LLAMA = replace(architecture("LlamaForCausalLM"), dtype=torch.bfloat16)
DENSE = Architecture(
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    DEEPSEEK | {"first_k_dense_replace": LAYERS + 1},
    dtype=torch.bfloat16,
)
FP8 = "fp8_per_channel"


def by_itself(folder: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 1} | more


def held(worker: OfflineWorker) -> dict[str, torch.Tensor]:
    """All tensors of both models, and what layers and their kernels keep beside them."""
    found = dict(everything(worker))
    for prefix, model in (("", worker.model), ("draft.", worker.draft)):
        assert model is not None
        for path, module in model.named_modules():
            found |= {f"{prefix}{path}.{name}": tensor for name, tensor in held_by(module)}
    return found


@pytest.mark.parametrize(
    ("make", "quantization", "draft", "loaders"),
    [
        (LLAMA.make, FP8, by_itself, 1),
        (LLAMA.make, FP8, lambda folder: by_itself(folder, quantization=FP8), 2),
        (LLAMA.make, None, lambda folder: by_itself(folder, quantization=FP8), 1),
        (lambda folder, seed: with_mtp(folder, seed, DENSE), FP8, lambda folder: dict(MTP), 2),
    ],
    ids=["target by loader", "both by loader", "draft by loader", "absorbed MLA of both"],
)
def test_what_one_or_both_models_take_through_vllms_loader_comes_out_as_from_a_fresh_load(
    tmp_path: Path, make: Any, quantization: str | None, draft: Any, loaders: int
) -> None:
    first, second = make(tmp_path / "1", 1), make(tmp_path / "2", 2)

    def build(folder: Path) -> OfflineWorker:
        more: dict[str, Any] = {"quantization": quantization} if quantization else {}
        return build_worker(folder, weights=True, dtype="bfloat16", speculative_config=draft(folder), **more)

    worker = build(first)
    where = {name: tensor.data_ptr() for name, tensor in held(worker).items()}
    resolved = resolved_as(worker, first)
    manifest = resolved.manifest
    assert manifest.unresolved == {} and len(resolved.loaders) == loaders and manifest.fallback
    assert len({p.tensor for p in manifest.pieces if "(whole)" in p.tensor}) == len(manifest.fallback)
    values = load(second)
    plan = compile_plan(
        [sharded(n, t) for n, t in values.items()], [Worker(TRAINERS, "s", manifest)], TRAINERS
    )
    assert plan.fallback.keys() == manifest.fallback.keys()
    shadow = Shadow(resolved, Slab.create(resolved.slab_bytes))
    shadow.slab.begin_write()
    fill(resolved, shadow.slab, values)
    flip(worker, shadow, 1)
    wanted, live = held(build(second)), held(worker)
    assert wanted.keys() == live.keys()
    for name, tensor in wanted.items():
        assert torch.equal(bits(live[name]), bits(tensor)), name
        assert live[name].data_ptr() == where[name] or name.endswith("_scale_cpu"), f"{name} is elsewhere"


def test_copies_that_vllm_found_equal_and_dropped_must_be_equal_in_each_version(tmp_path: Path) -> None:
    llama = architecture("LlamaForCausalLM")
    target = llama.make(tmp_path / "1", 1)
    head = eagle(tmp_path / "eagle", 11, target)
    copy = {"embed_tokens.weight": load(target)["model.embed_tokens.weight"]}
    save_file(load(head) | copy, head / "model.safetensors")
    said: dict[str, Any] = {"method": "eagle", "model": str(head), "num_speculative_tokens": 1}
    worker = build_worker(target, weights=True, dtype=DTYPE, speculative_config=dict(said))
    manifest = resolved_as(worker, target).manifest
    assert manifest.aliases["draft.embed_tokens.weight"] == "model.embed_tokens.weight"
    assert manifest.unresolved == {} and "draft.embed_tokens.weight" not in manifest.unused
    sent = [
        sharded(n, t) for n, t in (load(target) | {f"draft.{n}": t for n, t in load(head).items()}).items()
    ]
    plan = compile_plan(sent, [Worker(TRAINERS, "s", manifest)], TRAINERS)
    assert plan.tied["draft.embed_tokens.weight"] == "model.embed_tokens.weight"


def test_a_draft_model_runs_on_the_last_pipeline_stage_and_an_embedding_of_two_names_is_refused(
    tmp_path: Path,
) -> None:
    folder, parallel = with_mtp(tmp_path, 1), Parallel(1, 2)
    workers = [
        build_worker(folder, rank, parallel, weights=True, dtype=DTYPE, speculative_config=dict(MTP))
        for rank in range(2)
    ]
    assert workers[0].draft is None and workers[1].draft is not None
    first, last = (resolved_as(worker, folder).manifest for worker in workers)
    assert first.unresolved == {} and first.draft == frozenset()
    (why,) = last.unresolved.values()
    assert (
        f"model.embed_tokens.weight, {DRAFT}embed_tokens.weight all map to model.embed_tokens.weight" in why
    )


def test_what_the_trainer_does_not_send_of_a_draft_model_is_refused_with_both_ways_out(
    tmp_path: Path,
) -> None:
    folder = with_mtp(tmp_path, 1)
    worker = build_worker(folder, weights=True, dtype=DTYPE, speculative_config=dict(MTP))
    manifest = resolved_as(worker, folder).manifest
    sent = [sharded(name, value) for name, value in load(folder).items() if not name.startswith(DRAFT)]
    with pytest.raises(PlanError) as caught:
        compile_plan(sent, [Worker(TRAINERS, "s", manifest)], TRAINERS)
    found = caught.value.problem
    assert found.reason == "NotSent" and f"'{DRAFT}" in found.message
    assert (
        "WEIGHTSYNC_DRAFT_MODEL=update" in found.message and "WEIGHTSYNC_DRAFT_MODEL=frozen" in found.message
    )


def test_a_draft_model_whose_values_are_not_the_checkpoints_is_refused_by_its_names(tmp_path: Path) -> None:
    folder = with_mtp(tmp_path, 1)
    worker = build_worker(folder, weights=True, dtype=DTYPE, speculative_config=dict(MTP))
    assert worker.draft is not None
    before = {name: tensor.clone() for name, tensor in everything(worker)}
    loaders = {name: getattr(p, "weight_loader", None) for name, p in worker.draft.named_parameters()}
    with torch.no_grad():
        worker.draft.get_parameter(f"{DRAFT}eh_proj.weight")[-1] += 1
    unresolved = resolved_as(worker, folder).manifest.unresolved
    assert list(unresolved) == [f"{DRAFT}eh_proj.weight"]
    assert "it belongs to the draft model; its live values differ" in unresolved[f"{DRAFT}eh_proj.weight"]
    assert "WEIGHTSYNC_DRAFT_MODEL=frozen" in unresolved[f"{DRAFT}eh_proj.weight"]
    # Asking vLLM's loader for names has loaded nothing and left no trace.
    for name, tensor in everything(worker):
        assert name == f"draft.{DRAFT}eh_proj.weight" or torch.equal(bits(before[name]), bits(tensor)), name
    assert loaders == {name: getattr(p, "weight_loader", None) for name, p in worker.draft.named_parameters()}


def test_a_draft_model_whose_loader_wants_values_or_whose_files_are_elsewhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_mtp(tmp_path, 1)
    worker = build_worker(folder, weights=True, dtype=DTYPE, speculative_config=dict(MTP))
    draft = draft_of(worker.draft, worker.config)
    assert draft is not None
    with worker.within(), open_checkpoint(str(folder), None, "auto") as checkpoint:
        target = resolve(worker.model, checkpoint, config=worker.config)
        elsewhere = with_draft(target, draft, None, "no local files of x/y").manifest
        monkeypatch.setattr(
            type(draft.model), "load_weights", lambda self, weights: [w.item() for _, w in weights]
        )
        reads = with_draft(target, draft, checkpoint).manifest
    for manifest, words in (
        (elsewhere, "no local files of x/y"),
        (reads, "cannot be told from vLLM's loader"),
    ):
        assert manifest.expected == target.manifest.expected
        assert manifest.unresolved and all(words in why for why in manifest.unresolved.values())
