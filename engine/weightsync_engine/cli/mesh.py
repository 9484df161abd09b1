"""Pure: how a trainer that is described in a few words (`pp=8,ep=32,fsdp=4`) holds each tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout.tensors import Mesh, Placement, Replicate, Shard, SourceParameter, StridedShard, Within

DIMENSIONS = {
    "pp": "pipeline stages: whole layers",
    "replicate": "copies (DDP, the outer dimension of HSDP)",
    "ep": "expert parallelism: whole experts; other parameters are cut further",
    "fsdp": "cut along the first dimension, as FSDP does",
    "tp": "tensor parallelism, as the model's own plan cuts it",
}


MAX_RANKS = 65536
"""On either side."""


class MeshError(ValueError):
    """A description of a mesh that means nothing; says what to write instead."""


@dataclass(frozen=True, slots=True)
class Region:
    """One checkpoint parameter in a trainer's tensor."""

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the trainer's model and the checkpoint parameters that it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Wire dtype."""
    regions: tuple[Region, ...]
    tensor_parallel: int | None = None
    """The dimension that tensor parallelism cuts."""
    kept: bool = False
    """It is wide on purpose, as `trainer.precision` has it."""
    rounded_from: str = ""
    """The dtype in which the trainer computes with it, if the wire's has fewer bits and that is worth a word."""

    @property
    def layer(self) -> int | None:
        """Of `...layers.N...`, also `h.N` and `blocks.N`: the first number in the name that is a component."""
        return next((int(part) for part in self.name.split(".") if part.isdigit()), None)

    @property
    def expert(self) -> int | None:
        """Which one expert's tensor it is; None for one that stacks them, or is no expert's."""
        parts = self.name.split(".")
        at = parts.index("experts") if "experts" in parts else len(parts)
        return int(parts[at + 1]) if at + 1 < len(parts) and parts[at + 1].isdigit() else None

    @property
    def stacks_experts(self) -> bool:
        return "experts" in self.name.split(".") and self.expert is None and len(self.shape) == 3


@dataclass(frozen=True)
class TrainerMesh:
    """Named sizes, outermost first; ranks are row-major."""

    dims: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.dims)

    def __str__(self) -> str:
        return " x ".join(f"{name.upper()} {size}" for name, size in self.dims)

    def size(self, name: str) -> int:
        return dict(self.dims).get(name, 1)


def whole_number(text: str) -> int | None:
    """A size of at least 1 in plain digits; None: it is something else."""
    # Not all that is a digit to Python is one to `int`, and sizes are short.
    return (int(text) or None) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def parse_mesh(text: str) -> TrainerMesh:
    """`fsdp=64`, `replicate=2,fsdp=8`, `pp=8,ep=32,fsdp=4`, outermost first. Raises `MeshError`."""
    dims: list[tuple[str, int]] = []
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        known = ", ".join(DIMENSIONS)
        if name not in DIMENSIONS:
            raise MeshError(
                f"{part.strip()[:40]!r}: expected NAME=SIZE with a name of {known}, such as fsdp=8"
            )
        size = whole_number(number)
        if size is None:
            raise MeshError(
                f"{part.strip()[:40]!r}: the size must be a whole number of at least 1, such as fsdp=8"
            )
        if name in dict(dims):
            raise MeshError(f"{name!r} is given twice")
        dims.append((name, size))
    mesh = TrainerMesh(tuple(dims))
    if mesh.ranks > MAX_RANKS:
        raise MeshError(f"{mesh} has {mesh.ranks} ranks: at most {MAX_RANKS} can be planned")
    names = [name for name, _ in dims]
    if "tp" in names and names[-1] != "tp":
        raise MeshError("tp must be the innermost dimension, the last one")
    return mesh


def sources(tensors: Sequence[Tensor], mesh: TrainerMesh) -> tuple[SourceParameter, ...]:
    """All checkpoint parameters as the trainer's ranks hold them. Raises `MeshError` naming a tensor that cannot
    be held so."""
    layers = 1 + max((t.layer or 0 for t in tensors), default=0)
    experts = 1 + max((t.expert or 0 for t in tensors), default=0)
    meshes: dict[object, Mesh] = {}
    found: list[SourceParameter] = []
    for tensor in tensors:
        fixed = _fixed(tensor, mesh, layers, experts)
        kept = tuple((name, size) for name, size in mesh.dims if name not in fixed) or (("replicate", 1),)
        key = tuple(sorted(fixed.items()))
        if key not in meshes:
            meshes[key] = Mesh(tuple(size for _, size in kept), _ranks(mesh, fixed))
        placements = _placements(tensor, kept)
        for region in tensor.regions:
            whole = region.shape == tensor.shape
            within = None if whole else Within(tensor.name, tensor.shape, region.at)
            found.append(
                SourceParameter(
                    region.name,
                    region.shape,
                    tensor.dtype,
                    meshes[key],
                    placements,
                    within,
                    tensor.rounded_from,
                )
            )
    return tuple(found)


def _fixed(tensor: Tensor, mesh: TrainerMesh, layers: int, experts: int) -> dict[str, int]:
    """The coordinates of the ranks that own the tensor, where only some do."""
    fixed: dict[str, int] = {}
    stages = mesh.size("pp")
    if stages > 1:
        if tensor.layer is not None:
            fixed["pp"] = tensor.layer // -(-layers // stages)
        else:
            fixed["pp"] = 0 if "embed" in tensor.name else stages - 1
    owners = mesh.size("ep")
    if owners > 1 and tensor.expert is not None:
        if experts % owners:
            raise MeshError(f"ep={owners} does not divide the {experts} experts of {tensor.name!r}")
        fixed["ep"] = tensor.expert * owners // experts
    if owners > 1 and tensor.stacks_experts and tensor.shape[0] % owners:
        raise MeshError(f"ep={owners} does not divide the {tensor.shape[0]} experts of {tensor.name!r}")
    return fixed


def _ranks(mesh: TrainerMesh, fixed: dict[str, int]) -> tuple[int, ...]:
    choices = [[fixed[name]] if name in fixed else range(size) for name, size in mesh.dims]
    ranks = []
    for coordinate in itertools.product(*choices):
        rank = 0
        for (_, size), at in zip(mesh.dims, coordinate, strict=True):
            rank = rank * size + at
        ranks.append(rank)
    return tuple(ranks)


def _placements(tensor: Tensor, dims: Sequence[tuple[str, int]]) -> tuple[Placement, ...]:
    tp, size = tensor.tensor_parallel, dict(dims).get("tp", 1)
    found: list[Placement] = []
    for name, _ in dims:
        if name == "replicate" or not tensor.shape:
            found.append(Replicate())
        elif name == "tp":
            found.append(Replicate() if tp is None else Shard(tp))
        elif name == "fsdp" and tensor.stacks_experts and dict(dims).get("ep", 1) > 1:
            found.append(Shard(1))
        elif tp == 0 and size > 1 and name in ("fsdp", "ep"):
            found.append(StridedShard(0, size))
        else:
            found.append(Shard(0))
    return tuple(found)
