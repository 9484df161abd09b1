"""What a rank holds: how the trainer shards a parameter, and where a checkpoint parameter lands on a worker.

Ranks here are epoch ranks unless said otherwise: trainers `[0, T)`, workers `[T, T + N)`. A trainer's mesh is
in trainer ranks, which are the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .boxes import Box

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Names of torch dtypes (without `torch.`) that can travel, and the bytes of one element."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """An N-D arrangement of ranks, row-major, as `torch.distributed.DeviceMesh`."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this mesh dimension holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dimension `dim` is cut along this mesh dimension as `torch.chunk` cuts it (uneven and empty
    tails)."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """torch's `_StridedShard`: FSDP over TP on the same tensor dimension; `split_factor` is TP's size."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True)
class Within:
    """The trainer's tensor that a checkpoint parameter is a region of (one expert of a stacked tensor)."""

    tensor: str
    shape: tuple[int, ...]
    """Of the trainer's whole tensor."""
    at: tuple[int, ...]
    """Where the region begins. It has the parameter's shape, with extent 1 in the leading dimensions that the
    parameter lacks."""


@dataclass(frozen=True, slots=True)
class SourceParameter:
    """One checkpoint parameter as the trainer holds it; the same value on every trainer rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Wire dtype: what the snapshot holds, and what must arrive."""
    mesh: Mesh
    placements: tuple[Placement, ...]
    """Of the trainer's tensor: `within`'s, or the parameter itself."""
    within: Within | None = None
    rounded_from: str = ""
    """The dtype in which the trainer computes with it, if the wire's has fewer bits and that is worth a word."""

    @property
    def tensor(self) -> str:
        """The trainer's tensor, and the slab tensor that holds a rank's shard of it."""
        return self.name if self.within is None else self.within.tensor

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of the trainer's whole tensor: what mesh and placements cut."""
        return self.shape if self.within is None else self.within.shape

    @property
    def region(self) -> Box:
        """The parameter's elements in the trainer's whole tensor."""
        if self.within is None:
            return Box.whole(self.shape)
        return region_at(self.within.at, self.shape)


def region_at(at: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    """The region that begins `at` in a tensor of as many or more dimensions, extent 1 in the leading ones
    that `shape` lacks."""
    return Box(at, (1,) * (len(at) - len(shape)) + shape)


@dataclass(frozen=True, slots=True)
class SlabTensor:
    """A contiguous tensor inside a rank's slab (snapshot or shadow). `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `box` of checkpoint parameter `name` are held in slab tensor `tensor` at `at` (same shape).

    `box` counts in the whole parameter, `at` in the rank's own slab tensor (q inside qkv, gate inside
    gate_up). Where `at` has more dimensions than the parameter (one expert of a stacked tensor), the region
    has extent 1 in the leading ones.
    """

    name: str
    box: Box
    tensor: str
    at: tuple[int, ...]

    @property
    def region(self) -> Box:
        """The piece's elements in the slab tensor."""
        return region_at(self.at, self.box.shape)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a worker wants a checkpoint parameter to be: its whole shape and the dtype of the live tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TrainerManifest:
    """What one trainer rank tells its mover: the sources (equal on all ranks) and its own slab.

    A rank's local shard of parameter p is the slab tensor named p.tensor (absent where the rank holds nothing
    of it); which box of the trainer's tensor it is follows from mesh and placements.
    """

    trainer_rank: int
    sources: tuple[SourceParameter, ...]
    tensors: dict[str, SlabTensor]


@dataclass(frozen=True)
class WorkerManifest:
    """What one vLLM worker tells its mover: where each checkpoint parameter lands in its shadow."""

    expected: dict[str, Expected]
    pieces: tuple[Piece, ...]
    tensors: dict[str, SlabTensor]
    unresolved: dict[str, str]
    """Checkpoint or live names that cannot be written directly, each with the reason."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Checkpoint names whose live tensor is another parameter's storage (a tied head): alias -> the name in
    `pieces`.

    Either name may come from the trainer, and both may; one write covers both. An alias is never missing, and
    never written beside its name.
    """
    fallback: dict[str, str] = field(default_factory=dict)
    """Names whose piece is a whole copy for vLLM's own loader, not a part of the live model, each with the
    reason."""
    unused: frozenset[str] = frozenset()
    """Names in the checkpoint that vLLM's own load leaves out (a draft model's layers where none runs, say): a
    trainer may send them, and nobody takes them."""
    draft: frozenset[str] = frozenset()
    """Names in `expected` that no one but the server's draft model needs."""
