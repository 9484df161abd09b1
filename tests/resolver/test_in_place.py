"""For every architecture: a model whose live weights lie where movers write is the one that vLLM would load, or is
refused with the parameter that stands against it."""

from __future__ import annotations

import pytest
import torch
from tests.resolver.matrix import DTYPE, WANT, Folders, bits, fill, load, resolved_as, tensors
from tests.resolver.models import ARCHITECTURES, Architecture

from weightsync_engine.mover.slab import Slab
from weightsync_engine.resolve.offline import Parallel, build_worker
from weightsync_engine.vllm.inplace import InPlace, live_bytes, unfit

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


def case(architecture: Architecture) -> tuple[int, Parallel]:
    """A worker that holds a part."""
    parallel = Parallel(2) if Parallel(2) not in architecture.impossible else architecture.parallel[0]
    return min(1, parallel.workers - 1), parallel


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if not a.by_loader], ids=lambda a: a.title)
def test_what_is_written_in_place_is_bit_for_bit_what_vllm_would_load(
    folders: Folders, architecture: Architecture
) -> None:
    first, second = folders(architecture, 1), folders(architecture, 2)
    rank, parallel = case(architecture)
    worker = build_worker(first, rank, parallel, weights=True, dtype=DTYPE)
    before = {name: tensor.detach().clone() for name, tensor in tensors(worker.model)}
    resolved = resolved_as(worker, first, whole=True)
    assert unfit(resolved) == ""
    moved = live_bytes(resolved)
    slab = Slab.create(resolved.slab_bytes)
    live = InPlace(resolved, slab, worker.model)
    after = dict(tensors(worker.model))
    assert all(torch.equal(bits(after[name]), bits(tensor)) for name, tensor in before.items())
    begin, end = slab._payload.data_ptr(), slab._payload.data_ptr() + slab.payload_bytes
    inside = {t.data_ptr(): t for t in after.values() if begin <= t.data_ptr() < end}
    held = {t.data_ptr(): t.numel() * t.element_size() for t in after.values()}
    assert sum(held[address] for address in inside) >= moved
    slab.begin_write()
    fill(resolved, slab, load(second))
    slab.stamp(WANT.version, WANT.round)
    assert live.flip(WANT) is None
    fresh = dict(tensors(build_worker(second, rank, parallel, weights=True, dtype=DTYPE).model))
    assert fresh.keys() == after.keys()
    for name, tensor in fresh.items():
        assert torch.equal(bits(dict(tensors(worker.model))[name]), bits(tensor)), name


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.by_loader], ids=lambda a: a.title)
def test_a_model_that_vllms_loader_has_to_fill_is_refused_by_name(
    folders: Folders, architecture: Architecture
) -> None:
    first = folders(architecture, 1)
    rank, parallel = case(architecture)
    resolved = resolved_as(build_worker(first, rank, parallel, weights=True, dtype=DTYPE), first)
    why = unfit(resolved)
    assert "goes through vLLM's own loader" in why
    assert next(iter(resolved.manifest.fallback)) in why
