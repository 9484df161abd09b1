"""The worker's manifest, and for every tensor of the shadow the live one that it becomes at the flip."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..layout.boxes import Box
from ..layout.tensors import Expected, Piece, SlabTensor, WorkerManifest, region_at
from ..mover.slab import plan_slab
from .checkpoint import Checkpoint
from .fallback import fall_back, give_up
from .loader import ModelLoader
from .modules import dtype_name, name_rules, parts_of_others, read_model
from .names import CheckpointNames, NameRules
from .placement import LiveTensor, Placed, Placement, Whole, place
from .shards import Rerun

log = logging.getLogger(__name__)

TRANSFORMS = (
    "its live values differ from the checkpoint's: vLLM's loader transforms them, so a copy would not do "
    "what it does"
)
UNTOLD = "it has no loader, and the checkpoint's values do not tell which part of it this worker holds"


@dataclass(frozen=True)
class Double:
    """Live memory that gets what the slab holds for other live memory: it is received once and copied twice."""

    name: str
    live: torch.Tensor
    tensor: str
    """The slab tensor."""
    region: Box
    """Of it; may have more (leading) dimensions than `live`, of extent 1."""


@dataclass(frozen=True)
class Resolved:
    """What a worker needs to know of its model."""

    manifest: WorkerManifest
    """Its slab tensors are laid out as the live tensors, under vLLM's names; fused ones as the parameters in them."""
    slab_bytes: int
    views: dict[str, torch.Tensor]
    """Slab tensor -> the live memory that it becomes at the flip, a tensor or rows of one: same shape and dtype."""
    not_compared: str
    """Why the live values were not compared with a checkpoint; empty: they were."""
    shared: frozenset[str] = frozenset()
    """Slab tensors whose live tensor holds something unresolved as well, which others may write: of these, only
    the pieces may be copied."""

    direct_bytes: int = 0
    """Of this worker's weights: what is written directly."""
    loader_bytes: int = 0
    """What vLLM's own loader fills; `manifest.fallback` has the reasons."""
    other_bytes: int = 0
    """What is neither; `manifest.unresolved` has the reasons."""
    loaders: tuple[tuple[ModelLoader, dict[str, str]], ...] = ()
    """What fills the rest, and for each of its names the slab tensor that holds the whole of it."""
    doubles: tuple[Double, ...] = ()
    """What is in the slab for one live tensor and fills another one too."""
    memory: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    """Storage of each live tensor -> the checkpoint parameters that are known to be in it."""

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
        for double in self.doubles:
            region = double.region
            held = region_of(slab[double.tensor], region)
            yield double.name, double.live, held[(0,) * (held.ndim - double.live.ndim)]


def resolve(
    model: nn.Module,
    checkpoint: Checkpoint | None,
    why_none: str = "",
    refuse: str = "",
    *,
    planned: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    config: Any = None,
    rules: NameRules | None = None,
    beside: Container[Hashable] = (),
    whole: bool = False,
) -> Resolved:
    """Resolve a loaded model.

    What vLLM's own loader is to do is tried here, with the checkpoint's values; live tensors are as before when this
    returns.

    Args:
        model: the worker's own part of the model, loaded and post-processed.
        checkpoint: what it was loaded from, still as it was loaded (call this before any flip).
        why_none: why there is no checkpoint.
        refuse: a reason that concerns the whole model: then every parameter is unresolved with it.
        planned: the model has shapes only; nothing can be compared, and of the checkpoint only the shapes count.
        shapes: of the checkpoint's parameters by name, where they are known without one.
        config: vLLM's `VllmConfig`; without it nothing can go through vLLM's layerwise reload.
        rules: the model's rules for names; default: those that it declares.
        beside: storages of live tensors that are another model's: left out, whoever reads them.
        whole: every slab tensor is laid out as a whole live tensor, so that it can take its place.
    """
    described = [
        (tensor, data) for tensor, data in read_model(model, planned) if tensor.storage not in beside
    ]
    live = [tensor for tensor, _ in described]
    if refuse:
        live = [dataclasses.replace(tensor, problem=refuse, rerun=None) for tensor in live]
    memory = {tensor.name: data for tensor, data in described}
    if checkpoint is not None:
        shapes = checkpoint.shapes
    names = CheckpointNames(rules or name_rules(model), shapes)
    placement = place(live, names, shapes)
    if not planned:
        placement = compared(placement, memory, checkpoint, why_none)
    placement, loader = _with_loader(placement, live, names, shapes, model, checkpoint, config, planned)

    pieces, views = laid_out(placement, memory, whole)
    wholes = {name: f"{name} (whole)" for name in sorted(placement.fallback)}
    sent = {name: placement.expected[name] for name in wholes}
    pieces += tuple(
        Piece(name, Box.whole(sent[name].shape), wholes[name], (0,) * len(sent[name].shape))
        for name in wholes
    )
    tensors, size = slab_of(views, {wholes[name]: one for name, one in sent.items()})
    manifest = WorkerManifest(
        expected={name: Expected(whole.shape, whole.dtype) for name, whole in placement.expected.items()},
        pieces=pieces,
        tensors=tensors,
        unresolved=placement.unresolved,
        aliases=placement.aliases,
        fallback=placement.fallback,
        unused=_unused(model, names, shapes, placement),
    )
    shared = frozenset(views) & placement.shared
    memory_of: dict[Hashable, tuple[str, ...]] = {}
    for tensor in live:
        inside = (*memory_of.get(tensor.storage, ()), *placement.holds.get(tensor.name, ()))
        memory_of[tensor.storage] = tuple(dict.fromkeys(inside))
    direct, other, loaded = 0, 0, 0
    by_loader = {name for group in (loader.groups if loader else ()) for name in group.live}
    sizes: dict[str | None, int] = {}
    for placed in placement.placed:
        sizes[placed.live] = sizes.get(placed.live, 0) + placed.box.size
    held = {tensor.storage: tensor.name for tensor in live if tensor.name in sizes}
    for storage, one in {tensor.storage: tensor for tensor in live}.items():
        name = held.get(storage)
        data = memory[name or one.name]
        if one.name in by_loader:
            loaded += data.numel() * data.element_size()
            continue
        planned_here = sizes.get(name, 0) * data.element_size()
        direct += planned_here
        if name in shared or (name is None and not one.optional):
            other += data.numel() * data.element_size() - planned_here
    return Resolved(
        manifest, size, views, "" if checkpoint is not None else why_none, shared,
        direct, loaded, other, ((loader, wholes),) if loader else (), memory=memory_of,
    )  # fmt: skip


_MOST_PARTS = 8
"""Of a fused tensor that the slab holds by parameters: the flip pays for every copy."""


def laid_out(
    placement: Placement, memory: Mapping[str, torch.Tensor], whole: bool = False
) -> tuple[tuple[Piece, ...], dict[str, torch.Tensor]]:
    """The pieces by slab tensor, and for each slab tensor its live memory.

    A fused tensor is one slab tensor for each parameter in it, so that in the slab one parameter of all layers is one
    run of memory. One that is not made of a few parameters' rows alone is a slab tensor as it is; with `whole` all are.
    """
    inside: dict[str, list[Placed]] = {}
    for placed in placement.placed:
        inside.setdefault(placed.live, []).append(placed)
    apart = {
        name
        for name, parts in inside.items()
        if not whole and name not in placement.shared and _by_rows(parts, tuple(memory[name].shape))
    }
    pieces: list[Piece] = []
    views: dict[str, torch.Tensor] = {}
    for placed in placement.placed:
        live = memory[placed.live].detach()
        if placed.live in apart:
            tensor = f"{placed.name} in {placed.live}"
            views[tensor] = region_of(live, Box(placed.at, placed.box.shape))
            pieces.append(Piece(placed.name, placed.box, tensor, (0,) * len(placed.at)))
        else:
            views[placed.live] = live
            pieces.append(Piece(placed.name, placed.box, placed.live, placed.at))
    return tuple(pieces), views


def _by_rows(parts: list[Placed], shape: tuple[int, ...]) -> bool:
    """Whether the parts are of several parameters, each whole rows, and leave no row out."""
    if len(shape) < 2 or not 1 < len(parts) <= _MOST_PARTS or len({p.name for p in parts}) < len(parts):
        return False
    row = 0
    for part in sorted(parts, key=lambda p: p.at):
        if part.at != (row, *(0,) * (len(shape) - 1)) or part.box.shape[1:] != shape[1:]:
            return False
        row += part.box.shape[0]
    return row == shape[0]


def slab_of(
    views: Mapping[str, torch.Tensor], wholes: Mapping[str, Whole | Expected]
) -> tuple[dict[str, SlabTensor], int]:
    """Room for all of them, and its bytes."""
    return plan_slab(
        [(name, tuple(v.shape), dtype_name(v.dtype)) for name, v in views.items()]
        + [(name, whole.shape, whole.dtype) for name, whole in wholes.items()]
    )


def _with_loader(
    placement: Placement,
    live: list[LiveTensor],
    names: CheckpointNames,
    shapes: Mapping[str, tuple[int, ...]] | None,
    model: nn.Module,
    checkpoint: Checkpoint | None,
    config: Any,
    planned: bool,
) -> tuple[Placement, ModelLoader | None]:
    """What cannot be written directly goes to vLLM's loader, if that can be seen to do right by it."""
    if checkpoint is None and not planned:
        return placement, None
    dtypes = checkpoint.dtypes if checkpoint is not None else {}
    placement, groups = fall_back(placement, live, names, shapes, dtypes)
    unfit = {group: ModelLoader(model, [group], config).unfit(group, planned) for group in groups}
    failed = {group: why for group, why in unfit.items() if why}
    loader = ModelLoader(model, [group for group in groups if group not in failed], config)
    if loader.groups and checkpoint is not None and not planned:
        source, device = checkpoint, next(model.parameters()).device
        failed |= loader.rehearse(lambda name: source.whole(name).to(device))
    for group, why in failed.items():
        placement = give_up(placement, group, why)
    if failed:
        loader = ModelLoader(model, [group for group in groups if group not in failed], config)
    return placement, loader if loader.groups else None


def _unused(
    model: nn.Module,
    names: CheckpointNames,
    shapes: Mapping[str, tuple[int, ...]] | None,
    placement: Placement,
) -> frozenset[str]:
    """What the checkpoint has and vLLM loads nowhere. Every live tensor is accounted for under some name, so what is
    left over, and is not in the part of the model that other workers hold, is nobody's."""
    known = placement.expected.keys() | placement.aliases.keys() | placement.unresolved.keys()
    left = set(shapes or ()) - known - placement.fallback.keys()
    elsewhere = parts_of_others(model)
    return frozenset(name for name in left if not any(_below(names.live(name), path) for path in elsewhere))


def _below(live: str | None, path: str) -> bool:
    return live is not None and live.startswith(f"{path}.")


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
    unresolved, reruns = dict(placement.unresolved), dict(placement.reruns)
    known = () if checkpoint is None else checkpoint.shapes
    for name in placement.must_compare.difference(known):
        unresolved[name] = (
            "its layer is not known to load by plain copy, and there is no checkpoint to compare with"
            + (f" ({why_none})" if why_none else "")
        )
    for placed in placement.placed:
        if checkpoint is None or placed.name not in checkpoint.shapes or placed.name in unresolved:
            continue
        # Where nothing but the values speaks for a plain copy, all of them are asked.
        whole = placed.name in placement.must_compare
        for box, values in checkpoint.sample(placed.name, placed.box, whole):
            part = Placed(placed.name, box, placed.live, _moved(placed, box))
            view = view_of(memory[placed.live], part)
            if not torch.equal(view, values.to(device=view.device, dtype=view.dtype)):
                unresolved[placed.name], reruns[placed.name] = TRANSFORMS, Rerun()
                break
        if (other := placement.guessed.get(placed.name)) is not None and placed.name not in unresolved:
            mine, theirs = checkpoint.sample(placed.name, placed.box), checkpoint.sample(placed.name, other)
            if all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)):
                unresolved[placed.name], reruns[placed.name] = UNTOLD, Rerun()
    if unresolved == placement.unresolved:
        return placement
    return dataclasses.replace(
        placement,
        expected={name: whole for name, whole in placement.expected.items() if name not in unresolved},
        placed=tuple(placed for placed in placement.placed if placed.name not in unresolved),
        unresolved=unresolved,
        reruns=reruns,
        shared=placement.shared | {p.live for p in placement.placed if p.name in unresolved},
    )


def _moved(placed: Placed, box: Box) -> tuple[int, ...]:
    leading = len(placed.at) - len(box.start)
    trailing = zip(placed.at[leading:], box.start, placed.box.start, strict=True)
    return (*placed.at[:leading], *(a + b - s for a, b, s in trailing))
