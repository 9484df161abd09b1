"""One case: a worker that vLLM loaded from checkpoint A, and what our pieces make of it with the values of
checkpoint B."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import safe_open
from tests.resolver.models import ARCHITECTURES, EP, FULL, Architecture
from torch import nn

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import Mesh, Replicate, Shard, SourceParameter
from weightsync_engine.mover.slab import Slab
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import Plan
from weightsync_engine.plan.reference import execute
from weightsync_engine.plan.validate import Envelope, violations
from weightsync_engine.resolve.checkpoint import open_checkpoint
from weightsync_engine.resolve.draft import draft_of, with_draft
from weightsync_engine.resolve.manifest import Resolved, region_of, resolve
from weightsync_engine.resolve.offline import OfflineWorker, Parallel, build_worker
from weightsync_engine.vllm.shadow import Flipped, Shadow

DTYPE = "float32"
TRAINERS = 3
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


def everything(worker: OfflineWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the target, and of the draft model if there is one."""
    yield from tensors(worker.model)
    if worker.draft is not None:
        yield from ((f"draft.{name}", tensor) for name, tensor in tensors(worker.draft))


def move(
    first: Path, second: Path, parallel: Parallel, rank: int, move_by: Callable[..., None] = fill
) -> Moved:
    """Load A, fill the shadow with B by the manifest, flip."""
    worker = build_worker(first, rank, parallel, weights=True, dtype=DTYPE)
    resolved = resolved_as(worker, first)
    slab = Slab.create(resolved.slab_bytes)
    before = {name: tensor.detach().clone() for name, tensor in tensors(worker.model)}
    shadow = Shadow(resolved, slab)
    slab.begin_write()
    move_by(resolved, slab, load(second))
    flip(worker, shadow, 1)
    return Moved(worker, resolved, before, dict(tensors(worker.model)))


def resolved_as(worker: OfflineWorker, folder: Path, whole: bool = False) -> Resolved:
    """What the worker's engine does once vLLM has loaded its model from `folder`, and its draft model from where the
    server was told."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(worker.within())
        checkpoint = stack.enter_context(open_checkpoint(str(folder), None, "auto"))
        resolved = resolve(worker.model, checkpoint, config=worker.config, whole=whole)
        draft = draft_of(worker.draft, worker.config)
        if draft is None:
            return resolved
        files = stack.enter_context(open_checkpoint(draft.config.model_config.model, None, "auto"))
        return with_draft(resolved, draft, files)


def flip(worker: OfflineWorker, shadow: Shadow, round_: int) -> None:
    shadow.slab.stamp(WANT.version, round_)
    with worker.within():
        problem = shadow.flip(replace(WANT, round=round_))
    assert problem is None, problem


def move_server(first: Path, parallel: Parallel, *rounds: Path, **engine_arguments: Any) -> list[Moved]:
    """The same for all workers of a server, with each round's values on their way through a plan from three trainer
    ranks that cut them unevenly."""
    return move_values(first, parallel, [load(folder) for folder in rounds], **engine_arguments)


def move_values(
    first: Path,
    parallel: Parallel,
    values: Sequence[dict[str, torch.Tensor]],
    planned: Callable[[Plan], None] = lambda plan: None,
    **engine_arguments: Any,
) -> list[Moved]:
    """As `move_server`, with what a trainer sends in each round; `planned` sees the plan before the first."""
    sources = [sharded(name, value) for name, value in sorted(values[0].items())]
    slabs: dict[int, dict[str, npt.NDArray[Any]]] = {rank: {} for rank in range(TRAINERS)}
    held: list[tuple[OfflineWorker, Resolved, Slab, dict[str, torch.Tensor], Shadow]] = []
    for rank in range(parallel.workers):
        worker = build_worker(first, rank, parallel, weights=True, dtype=DTYPE, **engine_arguments)
        before = {name: tensor.detach().clone() for name, tensor in everything(worker)}
        resolved = resolved_as(worker, first)
        slab = Slab.create(resolved.slab_bytes)
        shadow = Shadow(resolved, slab)
        places = resolved.manifest.tensors.items()
        slabs[TRAINERS + rank] = {name: slab.tensor(place).numpy() for name, place in places}
        held.append((worker, resolved, slab, before, shadow))
    manifests = [resolved.manifest for _, resolved, *_ in held]
    plan = compile_plan(
        sources,
        [Worker(TRAINERS + i, "server", manifest) for i, manifest in enumerate(manifests)],
        TRAINERS,
        Envelope(max_local_bytes=100_000),
    )
    assert all(violations(step, Envelope(max_local_bytes=100_000)) == [] for step in plan.steps)
    assert plan.fallback.keys() == {name for m in manifests for name in m.fallback}
    planned(plan)
    for number, sent in enumerate(values, start=1):
        for source in sources:
            for rank, box in shard_boxes(source).items():
                if box is not None:
                    slabs[rank][source.name] = sent[source.name][_slices(box)].numpy().copy()
        for *_, slab, _, _ in held:
            slab.begin_write()
        execute(plan, slabs)
        for worker, _, _, _, shadow in held:
            flip(worker, shadow, number)
    return [
        Moved(worker, resolved, before, dict(everything(worker))) for worker, resolved, _, before, _ in held
    ]


def sharded(name: str, value: torch.Tensor) -> SourceParameter:
    """Cut along one dimension or another, or held by one rank, by the name."""
    turn = zlib.crc32(name.encode())
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    if not shape or turn % 5 == 0:
        return SourceParameter(name, shape, dtype, Mesh((1,), (turn % TRAINERS,)), (Replicate(),))
    mesh = Mesh((TRAINERS,), tuple(range(TRAINERS)))
    return SourceParameter(name, shape, dtype, mesh, (Shard(turn % len(shape)),))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
