"""The worker's manifest, and for every tensor of the shadow the live view that it is copied to at the
flip."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import torch
from torch import nn

from ..layout.boxes import Box
from ..layout.tensors import Expected, Piece, WorkerManifest
from ..mover.slab import plan_slab
from .checkpoint import Checkpoint
from .modules import name_rules, read_model
from .names import CheckpointNames
from .placement import Placed, Placement, place

log = logging.getLogger(__name__)

TRANSFORMS = (
    "its live values differ from the checkpoint's: vLLM's loader transforms them, so a copy would not do "
    "what it does"
)


@dataclass(frozen=True)
class Resolved:
    """What a worker needs to know of its model."""

    manifest: WorkerManifest
    slab_bytes: int
    views: dict[str, torch.Tensor]
    """Slab tensor -> the live memory that it becomes at the flip: same shape and dtype."""
    not_compared: str
    """Why the live values were not compared with a checkpoint; empty: they were."""


def resolve(
    model: nn.Module, checkpoint: Checkpoint | None, why_none: str = "", refuse: str = ""
) -> Resolved:
    """Resolve a loaded model.

    Args:
        model: the worker's own part of the model, loaded and post-processed.
        checkpoint: what it was loaded from, still as it was loaded (call this before any flip).
        why_none: why there is no checkpoint.
        refuse: a reason that concerns the whole model: then every parameter is unresolved with it.
    """
    described = list(read_model(model))
    live = [tensor for tensor, _ in described]
    if refuse:
        live = [dataclasses.replace(tensor, problem=refuse) for tensor in live]
    memory = {tensor.name: data for tensor, data in described}
    shapes = None if checkpoint is None else checkpoint.shapes
    placement = place(live, CheckpointNames(name_rules(model), shapes), shapes)
    placement = compared(placement, memory, checkpoint, why_none)

    counts: dict[str, int] = {}
    for placed in placement.placed:
        counts[placed.name] = counts.get(placed.name, 0) + 1
    views: dict[str, torch.Tensor] = {}
    pieces: list[Piece] = []
    for index, placed in enumerate(placement.placed):
        tensor = placed.name if counts[placed.name] == 1 else f"{placed.name}#{index}"
        views[tensor] = view_of(memory[placed.live], placed)
        pieces.append(Piece(placed.name, placed.box, tensor, (0,) * len(placed.box.shape)))
    tensors, size = plan_slab(
        (n, tuple(v.shape), str(v.dtype).removeprefix("torch.")) for n, v in views.items()
    )
    manifest = WorkerManifest(
        expected={name: Expected(whole.shape, whole.dtype) for name, whole in placement.expected.items()},
        pieces=tuple(pieces),
        tensors=tensors,
        unresolved=placement.unresolved,
        aliases=placement.aliases,
    )
    return Resolved(manifest, size, views, "" if checkpoint is not None else why_none)


def view_of(live: torch.Tensor, placed: Placed) -> torch.Tensor:
    """The part of a live tensor that a piece fills. Detached: writing to it records nothing."""
    view = live.detach()
    for dim, (at, length) in enumerate(zip(placed.at, placed.box.shape, strict=True)):
        view = view.narrow(dim, at, length)
    return view


def compared(
    placement: Placement, memory: dict[str, torch.Tensor], checkpoint: Checkpoint | None, why_none: str
) -> Placement:
    """The placement without what does not hold the checkpoint's own values, as far as a sample tells."""
    unresolved = dict(placement.unresolved)
    known = () if checkpoint is None else checkpoint.shapes
    for name in placement.must_compare.difference(known):
        unresolved[name] = (
            "its layer is not known to load by plain copy, and there is no checkpoint to compare with"
            + (f" ({why_none})" if why_none else "")
        )
    for placed in placement.placed:
        if checkpoint is None or placed.name not in checkpoint.shapes or placed.name in unresolved:
            continue
        for box, values in checkpoint.sample(placed.name, placed.box):
            part = Placed(placed.name, box, placed.live, _moved(placed, box))
            view = view_of(memory[placed.live], part)
            if not torch.equal(view, values.to(device=view.device, dtype=view.dtype)):
                unresolved[placed.name] = TRANSFORMS
                break
    if unresolved == placement.unresolved:
        return placement
    return dataclasses.replace(
        placement,
        expected={name: whole for name, whole in placement.expected.items() if name not in unresolved},
        placed=tuple(placed for placed in placement.placed if placed.name not in unresolved),
        unresolved=unresolved,
    )


def _moved(placed: Placed, box: Box) -> tuple[int, ...]:
    return tuple(a + b - s for a, b, s in zip(placed.at, box.start, placed.box.start, strict=True))
