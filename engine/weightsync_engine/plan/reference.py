"""Executes a plan on plain arrays, by the meaning of its steps alone: what every transport must equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..layout.boxes import Box
from .steps import Plan, Side, Step

Array = npt.NDArray[Any]
Slabs = dict[int, dict[str, Array]]
"""Per rank its slab tensors by name."""


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of an array."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def execute(plan: Plan, slabs: Slabs, writes: Slabs | None = None) -> None:
    """Carry out all steps. `writes`, of the same form, counts how often each target element was written."""
    for step in plan.steps:
        tensor = _assemble(step, slabs)
        for index, (rank, part) in enumerate(zip(step.target.ranks, step.target.parts, strict=True)):
            share = tensor[slices(step.target.local_box(step.shape, index))]
            slabs[rank][part.tensor][slices(part.box)] = share.reshape(part.box.shape)
            if writes is not None:
                writes[rank][part.tensor][slices(part.box)] += 1


def _assemble(step: Step, slabs: Slabs) -> Array:
    side: Side = step.source
    first = slabs[side.first_rank][side.parts[0].tensor]
    tensor: Array = np.empty(step.shape, first.dtype)
    for index, (rank, part) in enumerate(zip(side.ranks, side.parts, strict=True)):
        box = side.local_box(step.shape, index)
        tensor[slices(box)] = slabs[rank][part.tensor][slices(part.box)].reshape(box.shape)
    return tensor
