"""One case: a worker that vLLM loaded from checkpoint A, and what our pieces make of it with the values of
checkpoint B."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tests.resolver.models import ARCHITECTURES, EP, FULL, Architecture
from torch import nn

from weightsync_engine.mover.slab import Slab
from weightsync_engine.resolve.checkpoint import open_checkpoint
from weightsync_engine.resolve.manifest import Resolved, region_of, resolve
from weightsync_engine.resolve.offline import OfflineWorker, Parallel, build_worker
from weightsync_engine.vllm.shadow import Flipped, Shadow

DTYPE = "float32"
WANT = Flipped("uid", 1, 1, "b")


def cases() -> list[tuple[Architecture, Parallel]]:
    """All of them; with WEIGHTSYNC_MATRIX=full larger groups as well."""
    full = os.environ.get("WEIGHTSYNC_MATRIX") == "full"
    found = []
    for architecture in ARCHITECTURES:
        more = [p for p in FULL if full and p not in architecture.impossible]
        more = [p for p in more if not p.experts or EP[0] in architecture.parallel]
        found += [(architecture, p) for p in dict.fromkeys((*architecture.parallel, *more))]
    return found


class Folders:
    """Checkpoints by architecture and seed, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[str, int], Path] = {}

    def __call__(self, architecture: Architecture, seed: int) -> Path:
        key = (architecture.title, seed)
        if key not in self._made:
            self._made[key] = architecture.make(self._root / f"{len(self._made)}", seed)
        return self._made[key]


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def fill(resolved: Resolved, slab: Slab, values: dict[str, torch.Tensor]) -> None:
    """What the movers do: every piece gets its box of the checkpoint's parameter."""
    for piece in resolved.manifest.pieces:
        index = tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
        target = region_of(slab.tensor(resolved.manifest.tensors[piece.tensor]), piece.region)
        target.copy_(values[piece.name][index].view(target.shape))


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Moved:
    """A worker of checkpoint A after the flip to B's values."""

    worker: OfflineWorker
    resolved: Resolved
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def move(
    first: Path, second: Path, parallel: Parallel, rank: int, move_by: Callable[..., None] = fill
) -> Moved:
    """Load A, fill the shadow with B by the manifest, flip."""
    worker = build_worker(first, rank, parallel, weights=True, dtype=DTYPE)
    with open_checkpoint(str(first), None, "auto") as checkpoint:
        resolved = resolve(worker.model, checkpoint)
    slab = Slab.create(resolved.slab_bytes)
    before = {name: tensor.detach().clone() for name, tensor in tensors(worker.model)}
    shadow = Shadow(resolved, slab)
    slab.begin_write()
    move_by(resolved, slab, load(second))
    slab.stamp("b", 1)
    problem = shadow.flip(WANT)
    assert problem is None, problem
    return Moved(worker, resolved, before, dict(tensors(worker.model)))
