"""The resolver against vLLM's own loader, for every architecture and every worker of a server.

A random checkpoint A is loaded by vLLM; checkpoint B, cut over three trainer ranks, goes through our plan into the
shadows and by a flip into the live model; then every live tensor is compared bit for bit with what vLLM loads from B
itself.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from tests.resolver import table
from tests.resolver.matrix import DTYPE, Folders, bits, cases, load, move_server, tensors
from tests.resolver.models import ARCHITECTURES, Architecture

from weightsync_engine.resolve.offline import Parallel, build_worker

pytestmark = pytest.mark.timeout(900)
CASES = cases()
IDS = [f"{architecture.title}, {parallel}" for architecture, parallel in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(("architecture", "parallel"), CASES, ids=IDS)
def test_what_is_written_is_bit_for_bit_what_vllm_would_load(
    folders: Folders, architecture: Architecture, parallel: Parallel
) -> None:
    first, second = folders(architecture, 1), folders(architecture, 2)
    wanted = architecture.by_loader
    written: dict[str, torch.Tensor] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in load(first).items()}
    aliases, loaded = set(), set()
    for rank, moved in enumerate(move_server(first, parallel, second)):
        manifest = moved.resolved.manifest
        assert manifest.unresolved == {}
        for name, reason in manifest.fallback.items():
            expected = [why for pattern, why in wanted.items() if re.fullmatch(pattern, name)]
            assert expected, f"rank {rank}: {name} is not written directly: {reason}"
            assert re.search(expected[0], reason), f"rank {rank}: {name}: {reason}"
        loaded |= set(manifest.fallback)
        assert bool(moved.resolved.loader_bytes) == bool(manifest.fallback)
        assert moved.resolved.other_bytes == 0
        aliases |= set(manifest.aliases)
        fresh = dict(tensors(build_worker(second, rank, parallel, weights=True, dtype=DTYPE).model))
        assert fresh.keys() == moved.after.keys()
        for name, tensor in fresh.items():
            assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"
        for piece in manifest.pieces:
            assert manifest.expected[piece.name].shape == shapes[piece.name]
            index = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            written.setdefault(piece.name, torch.zeros(shapes[piece.name], dtype=torch.bool))[index] = True
    for pattern in wanted:
        assert any(re.fullmatch(pattern, name) for name in loaded), f"direct after all: {pattern}"
    for name in set(shapes) - aliases:
        missing = math.prod(shapes[name]) - int(written[name].sum()) if name in written else -1
        assert missing == 0, f"{name}: {missing} elements go nowhere"


BY_LOADER = [architecture for architecture in ARCHITECTURES if architecture.by_loader]


@pytest.mark.parametrize("architecture", BY_LOADER, ids=lambda a: a.name)
def test_what_vllm_loads_again_is_right_in_every_round(folders: Folders, architecture: Architecture) -> None:
    first, second, third = (folders(architecture, seed) for seed in (1, 2, 3))
    for rank, moved in enumerate(move_server(first, Parallel(2), second, third, second)):
        fresh = dict(tensors(build_worker(second, rank, Parallel(2), weights=True, dtype=DTYPE).model))
        for name, tensor in fresh.items():
            assert torch.equal(bits(moved.after[name]), bits(tensor)), f"rank {rank}: {name}"


def test_the_table_in_the_docs_is_current(folders: Folders) -> None:
    assert table.FILE.read_text() == table.table(folders), "run `make generate`"
