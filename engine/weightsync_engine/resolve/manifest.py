"""The worker's manifest, and for every tensor of the shadow the live one that it becomes at the flip."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..layout.boxes import Box
from ..layout.tensors import Expected, Piece, WorkerManifest, region_at
from ..mover.slab import plan_slab
from .checkpoint import Checkpoint
from .modules import dtype_name, name_rules, read_model
from .names import CheckpointNames
from .placement import Placed, Placement, place

log = logging.getLogger(__name__)

TRANSFORMS = (
    "its live values differ from the checkpoint's: vLLM's loader transforms them, so a copy would not do "
    "what it does"
)
UNTOLD = "it has no loader, and the checkpoint's values do not tell which part of it this worker holds"


@dataclass(frozen=True)
class Resolved:
    """What a worker needs to know of its model."""

    manifest: WorkerManifest
    """Its slab tensors are laid out as the live tensors, under vLLM's names."""
    slab_bytes: int
    views: dict[str, torch.Tensor]
    """Slab tensor -> the live tensor that it becomes at the flip: same shape and dtype."""
    not_compared: str
    """Why the live values were not compared with a checkpoint; empty: they were."""
    shared: frozenset[str] = frozenset()
    """Slab tensors whose live tensor holds something unresolved as well, which others may write: of these, only
    the pieces may be copied."""

    direct_bytes: int = 0
    """Of this worker's weights: what is written directly."""
    other_bytes: int = 0
    """What is not; `manifest.unresolved` has the reasons."""

    def copies(self, slab: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """What the flip copies: (name, live memory, the same region of `slab`'s tensor)."""
        for name, live in self.views.items():
            if name not in self.shared:
                yield name, live, slab[name]
        for piece in self.manifest.pieces:
            if piece.tensor in self.shared:
                region = piece.region
                yield (
                    f"{piece.name} in {piece.tensor}",
                    region_of(self.views[piece.tensor], region),
                    region_of(slab[piece.tensor], region),
                )


def resolve(
    model: nn.Module,
    checkpoint: Checkpoint | None,
    why_none: str = "",
    refuse: str = "",
    *,
    planned: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Resolved:
    """Resolve a loaded model.

    Args:
        model: the worker's own part of the model, loaded and post-processed.
        checkpoint: what it was loaded from, still as it was loaded (call this before any flip).
        why_none: why there is no checkpoint.
        refuse: a reason that concerns the whole model: then every parameter is unresolved with it.
        planned: the model has shapes only; nothing can be compared, and of the checkpoint only the shapes count.
        shapes: of the checkpoint's parameters by name, where they are known without one.
    """
    described = list(read_model(model, planned))
    live = [tensor for tensor, _ in described]
    if refuse:
        live = [dataclasses.replace(tensor, problem=refuse) for tensor in live]
    memory = {tensor.name: data for tensor, data in described}
    if checkpoint is not None:
        shapes = checkpoint.shapes
    placement = place(live, CheckpointNames(name_rules(model), shapes), shapes)
    if not planned:
        placement = compared(placement, memory, checkpoint, why_none)

    pieces = tuple(Piece(p.name, p.box, p.live, p.at) for p in placement.placed)
    views = {piece.tensor: memory[piece.tensor].detach() for piece in pieces}
    tensors, size = plan_slab((name, tuple(v.shape), dtype_name(v.dtype)) for name, v in views.items())
    manifest = WorkerManifest(
        expected={name: Expected(whole.shape, whole.dtype) for name, whole in placement.expected.items()},
        pieces=pieces,
        tensors=tensors,
        unresolved=placement.unresolved,
        aliases=placement.aliases,
    )
    shared = frozenset(views) & placement.shared
    direct, other = 0, 0
    sizes: dict[str | None, int] = {}
    for piece in pieces:
        sizes[piece.tensor] = sizes.get(piece.tensor, 0) + piece.box.size
    held = {tensor.storage: tensor.name for tensor in live if tensor.name in views}
    for storage, tensor in {tensor.storage: tensor for tensor in live}.items():
        name = held.get(storage)
        data = memory[name or tensor.name]
        planned_here = sizes.get(name, 0) * data.element_size()
        direct += planned_here
        if name in shared or (name is None and not tensor.optional):
            other += data.numel() * data.element_size() - planned_here
    return Resolved(manifest, size, views, "" if checkpoint is not None else why_none, shared, direct, other)


def region_of(tensor: torch.Tensor, region: Box) -> torch.Tensor:
    """A view of that region. Detached: writing to it records nothing."""
    return tensor.detach()[tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))]


def view_of(live: torch.Tensor, placed: Placed) -> torch.Tensor:
    """The part of a live tensor that a piece fills, in the piece's own shape."""
    view = region_of(live, region_at(placed.at, placed.box.shape))
    return view[(0,) * (view.ndim - len(placed.box.shape))]


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
        if (other := placement.guessed.get(placed.name)) is not None and placed.name not in unresolved:
            mine, theirs = checkpoint.sample(placed.name, placed.box), checkpoint.sample(placed.name, other)
            if all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)):
                unresolved[placed.name] = UNTOLD
    if unresolved == placement.unresolved:
        return placement
    return dataclasses.replace(
        placement,
        expected={name: whole for name, whole in placement.expected.items() if name not in unresolved},
        placed=tuple(placed for placed in placement.placed if placed.name not in unresolved),
        unresolved=unresolved,
        shared=placement.shared | {p.live for p in placement.placed if p.name in unresolved},
    )


def _moved(placed: Placed, box: Box) -> tuple[int, ...]:
    leading = len(placed.at) - len(box.start)
    trailing = zip(placed.at[leading:], box.start, placed.box.start, strict=True)
    return (*placed.at[:leading], *(a + b - s for a, b, s in trailing))
