"""Where vLLM's own layerwise reload is wrong, and nothing says so: there the resolver refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.resolver.matrix import DTYPE, Folders, bits, load, resolved_as, tensors
from tests.resolver.models import ARCHITECTURES

from weightsync_engine.resolve.modules import EMPTY
from weightsync_engine.resolve.offline import OfflineWorker, build_worker

GPT = next(a for a in ARCHITECTURES if a.name == "GptOssForCausalLM")
TIED = next(a for a in ARCHITECTURES if a.name == "Qwen3ForCausalLM" and a.note == "tied")
EXPERTS = next(a for a in ARCHITECTURES if a.name == "Qwen3MoeForCausalLM")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("own-reload"))


def reload(worker: OfflineWorker, folder: Path) -> None:
    """As vLLM does between `start_weight_update` and `finish_weight_update`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    with worker.within(), set_current_vllm_config(worker.config), torch.no_grad():
        layerwise.initialize_layerwise_reload(worker.model)
        worker.model.load_weights(iter(load(folder).items()))
        layerwise.finalize_layerwise_reload(worker.model, worker.config.model_config)


def product(model: torch.nn.Module, path: str) -> torch.Tensor:
    """What a linear layer computes, of the same input for all."""
    module: Any = model.get_submodule(path)
    width = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    given = torch.linspace(-1, 1, 3 * width, dtype=torch.float32).reshape(3, width)
    result = module.quant_method.apply(module, given, None)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.usefixtures("packed_weights")
def test_a_build_that_packs_weights_keeps_the_old_ones_of_a_tied_head_and_is_refused(
    folders: Folders,
) -> None:
    # C12, C28
    first, second = folders(TIED, 1), folders(TIED, 2)
    worker, stale, fresh = (build_worker(f, weights=True, dtype=DTYPE) for f in (first, first, second))
    unresolved = resolved_as(worker, first).manifest.unresolved
    assert EMPTY in unresolved.values() and "tied head" in EMPTY
    reload(worker, second)
    o_proj = "model.layers.0.self_attn.o_proj"
    assert torch.equal(product(worker.model, o_proj), product(fresh.model, o_proj))
    assert torch.equal(product(worker.model, "lm_head"), product(stale.model, "lm_head"))
    assert not torch.equal(product(worker.model, "lm_head"), product(fresh.model, "lm_head"))


@pytest.mark.usefixtures("packed_weights")
def test_a_build_that_packs_experts_packs_them_otherwise_in_a_reload_and_is_refused(folders: Folders) -> None:
    # C05, C28
    first, second = folders(EXPERTS, 1), folders(EXPERTS, 2)
    worker, fresh = (build_worker(f, weights=True, dtype=DTYPE) for f in (first, second))
    unresolved = resolved_as(worker, first).manifest.unresolved
    (why,) = {why for name, why in unresolved.items() if "experts" in name}
    assert "packed form" in why and "vLLM's own reload" in why
    reload(worker, second)
    live = dict(tensors(worker.model))
    unlike = {
        n.rpartition(".")[2] for n, t in tensors(fresh.model) if not torch.equal(bits(t), bits(live[n]))
    }
    assert unlike == {"w13_weight", "w2_weight"}


def test_a_kernels_own_copy_of_sinks_stays_as_it_was_and_is_refused(folders: Folders) -> None:
    # C04: kernels that want them in another dtype convert them once, and not again.
    first, second = folders(GPT, 1), folders(GPT, 2)
    worker = build_worker(first, weights=True, dtype=DTYPE)
    attention: Any = worker.model.get_submodule("model.layers.0.attn.attn")
    attention.impl.sinks = attention.impl.sinks.to(torch.float64)
    before = attention.impl.sinks.clone()
    why = resolved_as(worker, first).manifest.unresolved["model.layers.0.self_attn.sinks"]
    assert "sinks of float64" in why and "leaves other values in model.layers.0.attn.attn.impl.sinks" in why
    assert torch.equal(attention.impl.sinks, before), "the trial changes nothing"
    reload(worker, second)
    assert torch.equal(attention.impl.sinks, before)
    assert not torch.equal(before.to(torch.float32), load(second)["model.layers.0.self_attn.sinks"])
