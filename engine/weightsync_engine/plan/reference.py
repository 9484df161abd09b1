"""Executes a plan on plain arrays, by the meaning of its steps in M2N's terms: what every transport must
equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout.boxes import Box
from .plan import LocalStep, Plan

Array = npt.NDArray[Any]
Slabs = dict[int, dict[str, Array]]
"""Per rank its slab tensors by name."""


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of an array."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def execute(plan: Plan, slabs: Slabs, writes: Slabs | None = None) -> None:
    """Carry out all steps. `writes`, of the same form, counts how often each target element was written."""
    local: dict[int, dict[int, LocalStep]] = {
        rank: {s.index: s for s in plan.local(rank)} for rank in range(plan.world_size)
    }
    for index, step in enumerate(plan.steps):
        tensor: Array | None = None
        for i, rank in enumerate(step.source.ranks):
            share = _pack(local[rank][index], slabs[rank])
            tensor = np.empty(step.shape, share.dtype) if tensor is None else tensor
            box = step.source.local_box(step.shape, i)
            tensor[slices(box)] = share.reshape(box.shape)
        assert tensor is not None
        for i, rank in enumerate(step.target.ranks):
            share = tensor[slices(step.target.local_box(step.shape, i))].reshape(-1)
            _unpack(local[rank][index], share, slabs[rank], writes[rank] if writes is not None else None)


def _pack(own: LocalStep, slab: dict[str, Array]) -> Array:
    return np.concatenate(
        [slab[p.tensor][slices(p.box)].reshape(-1) for block in own.blocks for p in block.parts]
    )


def _unpack(own: LocalStep, share: Array, slab: dict[str, Array], writes: dict[str, Array] | None) -> None:
    at = 0
    for part in (p for block in own.blocks for p in block.parts):
        slab[part.tensor][slices(part.box)] = share[at : at + part.box.size].reshape(part.box.shape)
        if writes is not None:
            writes[part.tensor][slices(part.box)] += 1
        at += part.box.size
    assert at == share.size
