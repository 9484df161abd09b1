"""From a model, or named tensors, to what travels: names, wire dtypes, meshes, placements, local shards.

No collective is called here, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ..layout.tensors import DTYPE_BYTES, Mesh, Placement, Replicate, Shard, SourceParameter, StridedShard
from .handle import PublishError

Names = Callable[[str], str | None] | Mapping[str, str | None] | None
"""Trainer's name -> checkpoint name; None: not sent. A mapping leaves the names that it lacks as they are."""
WireDtype = torch.dtype | Mapping[str, torch.dtype] | Callable[[str, torch.Tensor], torch.dtype | None] | None
"""One dtype for all floating point tensors, or by checkpoint name, or a function; None: as trained."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of dotted names that wrappers put in and checkpoints do not have."""


@dataclass(frozen=True)
class Held:
    """One checkpoint parameter as this rank holds it now."""

    name: str
    tensor: torch.Tensor
    """The DTensor, or the plain tensor: kept, its local part read at every publish."""
    wire: torch.dtype
    parameter: bool
    """Not a buffer."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, without copy."""
        return self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor.detach()

    def describe(self) -> dict[str, Any]:
        """Layout as plain values, for comparison between ranks. Raises `PublishError`."""
        mesh = placements = None
        if isinstance(self.tensor, DTensor):
            mesh = {
                "shape": list(self.tensor.device_mesh.mesh.shape),
                "ranks": self.tensor.device_mesh.mesh.flatten().tolist(),
            }
            placements = [_placement(self.name, p, self.tensor.ndim) for p in self.tensor.placements]
        return {
            "name": self.name,
            "shape": list(self.tensor.shape),
            "dtype": _dtype_name(self.wire),
            "mesh": mesh,
            "placements": placements,
            "parameter": self.parameter,
        }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _placement(name: str, placement: Any, rank: int) -> list[Any]:
    # torch's strided shard is, or is not, a Shard, depending on the version: asked for first.
    if isinstance(placement, _StridedShard):
        return ["strided", placement.dim % rank, int(placement.split_factor)]
    if isinstance(placement, TorchShard):
        return ["shard", placement.dim % rank]
    if isinstance(placement, TorchReplicate):
        return ["replicate"]
    raise PublishError(f"parameter {name!r} has placement {placement}: publish it as Shard or Replicate")


def _read_placement(said: list[Any]) -> Placement:
    kind, *rest = said
    if kind == "strided":
        return StridedShard(*rest)
    return Shard(*rest) if kind == "shard" else Replicate()


# ---- what the model holds ----------------------------------------------------------------------------------


class Sources:
    """Reads the trainer's tensors anew at each call of `held`."""

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, torch.Tensor]],
        names: Names = None,
        dtype: WireDtype = None,
    ) -> None:
        self._module: nn.Module | None = None
        self._pairs: list[tuple[str, torch.Tensor]] = []
        if isinstance(model, nn.Module):
            self._module = model
        elif isinstance(model, Iterable) and not isinstance(model, Mapping | torch.Tensor | str):
            self._pairs = list(model)
            for pair in self._pairs:
                if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                    raise PublishError(
                        f"expected pairs of (checkpoint name, tensor), got {type(pair).__name__}"
                    )
        else:
            raise PublishError(
                "expected an nn.Module or an iterable of (checkpoint name, tensor), got "
                f"{type(model).__name__}" + (": pass .items()" if isinstance(model, Mapping) else "")
            )
        self._names = names
        self._dtype = dtype
        self.aliases: dict[str, str] = {}
        """Names that share the storage of another, which alone is sent. vLLM ties by its own config."""

    def held(self) -> list[Held]:
        """All that travels, in the model's order. Raises `PublishError` naming the parameter."""
        found: dict[str, Held] = {}
        owner: dict[Any, str] = {}
        aliases: dict[str, str] = {}
        wires = _fsdp_dtypes(self._module) if self._module is not None else {}
        for trainer_name, tensor, parameter in self._named():
            name = self._rename(trainer_name)
            if name is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise PublishError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
            identity = _storage(tensor)
            if identity in owner:
                aliases[name] = owner[identity]
                continue
            if name in found:
                raise PublishError(f"two different tensors are named {name!r}: check `names`")
            wire = self._wire(name, tensor, wires.get(id(tensor)))
            found[name] = _checked(Held(name, tensor, wire, parameter))
            owner[identity] = name
        self.aliases = aliases
        return list(found.values())

    def _named(self) -> Iterable[tuple[str, Any, bool]]:
        if self._module is None:
            yield from ((name, tensor, True) for name, tensor in self._pairs)
            return
        module = self._module
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        _reshard(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield name, parameter, True
        for prefix, child in module.named_modules():
            for name, buffer in child.named_buffers(recurse=False):
                if name not in child._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer, False

    def _rename(self, name: str) -> str | None:
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        if self._names is None:
            return plain
        if isinstance(self._names, Mapping):
            return self._names.get(plain, plain)
        return self._names(plain)

    def _wire(self, name: str, tensor: torch.Tensor, trained: torch.dtype | None) -> torch.dtype:
        default = trained or tensor.dtype
        chosen: torch.dtype | None
        if isinstance(self._dtype, torch.dtype):
            chosen = self._dtype if tensor.dtype.is_floating_point else None
        elif isinstance(self._dtype, Mapping):
            chosen = self._dtype.get(name)
        elif self._dtype is not None:
            chosen = self._dtype(name, tensor)
        else:
            chosen = None
        wire = chosen or default
        if wire.is_floating_point != tensor.dtype.is_floating_point:
            raise PublishError(f"parameter {name!r} is {tensor.dtype} and cannot travel as {wire}")
        return wire


def _checked(held: Held) -> Held:
    name, local = held.name, held.local
    if local.device.type == "meta":
        raise PublishError(f"parameter {name!r} is on the meta device: it has no values to send")
    if _dtype_name(held.wire) not in DTYPE_BYTES:
        raise PublishError(
            f"parameter {name!r}: dtype {held.wire} cannot travel; known: {', '.join(DTYPE_BYTES)}"
        )
    if isinstance(held.tensor, DTensor):
        mesh = held.tensor.device_mesh
        shape, _ = compute_local_shape_and_global_offset(held.tensor.shape, mesh, held.tensor.placements)
        if tuple(shape) != tuple(local.shape):
            raise PublishError(
                f"parameter {name!r}: this rank holds {tuple(local.shape)}, its placements "
                f"{held.tensor.placements} on a mesh of {tuple(mesh.shape)} say {tuple(shape)}"
            )
    elif local.numel() and local.untyped_storage().size() == 0:
        raise PublishError(f"parameter {name!r} has no storage: it was freed after a forward pass")
    return held


def _storage(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same values in the same memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0 or local.device.type == "meta":
        return id(tensor)
    return (
        local.device,
        local.data_ptr(),
        local.dtype,
        tuple(local.shape),
        local.stride(),
        tuple(tensor.shape),
    )


def _reshard(module: nn.Module) -> None:
    """Make every FSDP2 module show its sharded DTensors again: local, no collective."""
    from torch.distributed.fsdp import FSDPModule

    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def _fsdp_dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """id of a sharded parameter -> the dtype in which FSDP2 computes with it."""
    from torch.distributed.fsdp import FSDPModule

    _reshard(module)
    found: dict[int, torch.dtype] = {}
    for child in module.modules():
        if not isinstance(child, FSDPModule):
            continue
        for group in child._get_fsdp_state()._fsdp_param_groups:
            # Of the group's policy: the parameters' own attribute exists only after the first forward pass.
            wire = group.mp_policy.param_dtype
            for param in group.fsdp_params:
                if wire is not None and param.sharded_param.dtype.is_floating_point:
                    found[id(param.sharded_param)] = wire
    return found


# ---- what all ranks hold together --------------------------------------------------------------------------


def merge(said: list[list[dict[str, Any]]]) -> tuple[SourceParameter, ...]:
    """One list of sources from what each rank says it holds (`Held.describe`), equal on all ranks.

    A plain tensor is replicated on the ranks that hold it; a DTensor must be held by the ranks of its mesh.
    Raises `PublishError` naming parameter and ranks.
    """
    holders: dict[str, list[int]] = {}
    layout: dict[str, tuple[int, dict[str, Any]]] = {}
    for rank, entries in enumerate(said):
        for entry in entries:
            name = entry["name"]
            first = layout.setdefault(name, (rank, entry))
            holders.setdefault(name, []).append(rank)
            for what in ("shape", "dtype", "mesh", "placements"):
                if first[1][what] != entry[what]:
                    raise PublishError(
                        f"parameter {name!r}: {what} is {first[1][what]} on rank {first[0]} and "
                        f"{entry[what]} on rank {rank}"
                    )
            if first[1].get("fingerprint") != entry.get("fingerprint"):
                raise PublishError(
                    f"parameter {name!r} is a plain tensor with other values on rank {first[0]} than on rank "
                    f"{rank}: make it a DTensor, or give each rank's part a name of its own"
                )
    if not layout:
        raise PublishError("there are no parameters to publish")
    sources = []
    for name, (_, entry) in layout.items():
        ranks = holders[name]
        placements: tuple[Placement, ...]
        if entry["mesh"] is None:
            mesh, placements = Mesh((len(ranks),), tuple(ranks)), (Replicate(),)
        else:
            mesh = Mesh(tuple(entry["mesh"]["shape"]), tuple(entry["mesh"]["ranks"]))
            if sorted(mesh.ranks) != ranks:
                raise PublishError(
                    f"parameter {name!r}: its mesh has ranks {sorted(mesh.ranks)}, but it is held by {ranks}"
                )
            placements = tuple(_read_placement(p) for p in entry["placements"])
        sources.append(SourceParameter(name, tuple(entry["shape"]), entry["dtype"], mesh, placements))
    return tuple(sources)


FINGERPRINT_ELEMENTS = 4096


def fingerprint(held: Held) -> str | None:
    """Of a plain parameter: its first elements, as a hash; None for DTensors and buffers.

    Ranks that hold different values under one name (experts of expert parallelism, a slice cut by hand) are
    found by it: such a tensor must be a DTensor, or have a name of its own.
    """
    import hashlib

    if isinstance(held.tensor, DTensor) or not held.parameter:
        return None
    head = held.local.flatten()[:FINGERPRINT_ELEMENTS].contiguous().cpu()
    return hashlib.blake2b(head.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
