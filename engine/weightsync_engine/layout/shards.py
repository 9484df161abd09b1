"""Which box of a parameter each rank of its mesh holds: torch's DTensor rules, without torch."""

from __future__ import annotations

import math

from .boxes import Box
from .tensors import Replicate, Shard, SourceParameter, StridedShard, Within, region_at


class LayoutError(ValueError):
    """A mesh or placement that means nothing, or nothing that can be expressed; names the parameter."""


def check_source(source: SourceParameter) -> None:
    """Raises `LayoutError` if mesh and placements do not fit each other and the parameter's shape."""
    mesh, where = source.mesh, f"parameter {source.name!r}"
    if not mesh.shape or any(n < 1 for n in mesh.shape) or math.prod(mesh.shape) != len(mesh.ranks):
        raise LayoutError(f"{where}: a mesh of shape {mesh.shape} does not hold {len(mesh.ranks)} ranks")
    if len(set(mesh.ranks)) != len(mesh.ranks) or any(r < 0 for r in mesh.ranks):
        raise LayoutError(f"{where}: mesh ranks {mesh.ranks} are not distinct and at least 0")
    if len(source.placements) != len(mesh.shape):
        raise LayoutError(
            f"{where}: {len(source.placements)} placements for a mesh of {len(mesh.shape)} dimensions"
        )
    if source.within is not None and not _inside(source.within, source.shape):
        raise LayoutError(
            f"{where}: its region of shape {source.shape} at {source.within.at} is not inside the trainer's "
            f"{source.within.tensor!r} of shape {source.within.shape}"
        )
    for at, placement in enumerate(source.placements):
        if isinstance(placement, Replicate):
            continue
        if not 0 <= placement.dim < len(source.tensor_shape):
            raise LayoutError(f"{where}: {placement} has no such dimension in shape {source.tensor_shape}")
        if isinstance(placement, StridedShard):
            inner = math.prod(
                mesh.shape[i]
                for i in range(at + 1, len(mesh.shape))
                if isinstance(p := source.placements[i], Shard) and p.dim == placement.dim
            )
            if placement.split_factor != inner:
                raise LayoutError(
                    f"{where}: {placement} asks for {placement.split_factor} shards inside it, "
                    f"the mesh has {inner}"
                )


def _inside(within: Within, shape: tuple[int, ...]) -> bool:
    if not len(within.at) == len(within.shape) >= len(shape) or min(within.at, default=0) < 0:
        return False
    return Box.whole(within.shape).contains(region_at(within.at, shape))


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of part `index` when `torch.chunk` cuts `length` into `parts`; the tail may be empty."""
    size = -(-length // parts)
    return min(length, size * index), min(length, size * (index + 1))


def shard_boxes(source: SourceParameter) -> dict[int, Box | None]:
    """Per rank of the mesh the box of the trainer's tensor that it holds; None where it holds no element.

    Raises `LayoutError` as `check_source` does.
    """
    check_source(source)
    # A strided shard was applied by FSDP to what tensor parallelism had already cut: the inner cut comes
    # first.
    order = [i for i, p in enumerate(source.placements) if isinstance(p, Shard)]
    order += [i for i, p in reversed(list(enumerate(source.placements))) if isinstance(p, StridedShard)]
    boxes: dict[int, Box | None] = {}
    for place, rank in enumerate(source.mesh.ranks):
        coordinate: list[int] = []
        for size in reversed(source.mesh.shape):
            coordinate.insert(0, place % size)
            place //= size
        start, shape = [0] * len(source.tensor_shape), list(source.tensor_shape)
        for i in order:
            placement = source.placements[i]
            assert not isinstance(placement, Replicate)
            d = placement.dim
            a, b = chunk(shape[d], source.mesh.shape[i], coordinate[i])
            start[d], shape[d] = start[d] + a, b - a
        box = Box(tuple(start), tuple(shape))
        boxes[rank] = box if box.size else None
    return boxes
