"""From a model, or named tensors, to what travels: names, wire dtypes, meshes, placements, local shards.

No collective is called here, and nothing is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ..layout.tensors import (
    DTYPE_BYTES,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from .families import add_prefix, family_rules, one_model
from .handle import PublishError
from .naming import (
    Names,
    Part,
    Refusal,
    Rule,
    Shapes,
    adapter_leftover,
    adapter_names,
    checked,
    plain_name,
    without_adapter,
)
from .precision import declared_wide

WireDtype = torch.dtype | Mapping[str, torch.dtype] | Callable[[str, torch.Tensor], torch.dtype | None] | None
"""One dtype for all floating point tensors; or by checkpoint name or trainer's name; or a function of checkpoint
name and trainer's tensor. None: as trained. What is stacked in one tensor travels in one dtype."""


@dataclass(frozen=True)
class Held:
    """One of the trainer's tensors as this rank holds it now."""

    name: str
    """Of the tensor in the snapshot: the checkpoint name where it is one parameter, else by the trainer's name."""
    tensor: torch.Tensor
    """The DTensor, or the plain tensor: kept, its local part read at every publish."""
    wire: torch.dtype
    parameter: bool
    """Not a buffer."""
    computed: torch.dtype
    """In which the trainer computes with it."""
    kept: bool
    """It is in that dtype on purpose: a buffer, or declared so by the model."""
    parts: tuple[Part, ...] | None = None
    """The checkpoint parameters in it; None: it is one, called `name`."""
    packed: tuple[int, int, int] | None = None
    """(dim, i, n): this is the i-th of n equal parts along `dim` of the tensor, each of which is sharded by itself
    (gate and up of a packed tensor under tensor parallelism)."""

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, without copy."""
        local = self.tensor._local_tensor if isinstance(self.tensor, DTensor) else self.tensor.detach()
        if self.packed is None:
            return local
        dim, i, n = self.packed
        size = local.shape[dim] // n
        return local.narrow(dim, i * size, size)

    @property
    def shape(self) -> list[int]:
        """Of the whole tensor, or of its part."""
        shape = list(self.tensor.shape)
        if self.packed is not None:
            shape[self.packed[0]] //= self.packed[2]
        return shape

    def describe(self) -> dict[str, Any]:
        """Layout as plain values, for comparison between ranks. Raises `PublishError`."""
        mesh = placements = None
        if isinstance(self.tensor, DTensor):
            mesh = _mesh(self.tensor.device_mesh)
            placements = [_placement(self.name, p, self.tensor.ndim) for p in self.tensor.placements]
            if self.packed is not None:
                at = _packed(self.tensor)
                assert at is not None
                placements[at] = ["shard", self.packed[0]]
        return {
            "name": self.name,
            "shape": self.shape,
            "dtype": _dtype_name(self.wire),
            "mesh": mesh,
            "placements": placements,
            "parameter": self.parameter,
            "computed": _dtype_name(self.computed),
            "kept": self.kept,
            "parts": None
            if self.parts is None
            else [[p.name, list(p.at), list(p.shape)] for p in self.parts],
        }


@lru_cache(maxsize=64)
def _mesh(mesh: Any) -> dict[str, Any]:
    """One object for each mesh, however many tensors are on it."""
    return {"shape": list(mesh.mesh.shape), "ranks": mesh.mesh.flatten().tolist()}


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


def read_placement(said: list[Any]) -> Placement:
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
            if isinstance(model, nn.parallel.DistributedDataParallel):
                model = model.module
                assert isinstance(model, nn.Module)
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
        self._wide = declared_wide(self._module)
        self._shapes: list[tuple[str, tuple[int, ...]]] = []
        self._decided: dict[str, str | tuple[Part, ...] | None] = {}
        self._rules: dict[str, Rule] | None = None
        self._adapters: dict[str, str | None | Refusal] = {}
        self._wires: dict[tuple[str, torch.dtype, torch.dtype | None], torch.dtype] = {}
        self._seen: list[tuple[object, ...]] = []
        self._held: list[Held] = []
        self.aliases: dict[str, str] = {}
        """Names that share the storage of another, which alone is sent. vLLM ties by its own config."""

    def held(self) -> list[Held]:
        """All that travels, in the model's order: the same list as before if every tensor is the same object, and lies
        where it lay. Raises `PublishError` naming the parameter."""
        named = [(plain_name(name), tensor, parameter) for name, tensor, parameter in self._named()]
        for trainer_name, tensor, _ in named:
            if not isinstance(tensor, torch.Tensor):
                raise PublishError(f"{trainer_name!r} is a {type(tensor).__name__}, not a tensor")
        seen = [(name, id(tensor), *_lies(tensor)) for name, tensor, _ in named]
        # An adapter may have been merged, or not, without any tensor being another one.
        if self._seen != seen or self._adapters or not self._held:
            self._held, self._seen = [], []
            self._held, self._seen = self._read(named), seen
        return self._held

    def _read(self, named: list[tuple[str, torch.Tensor, bool]]) -> list[Held]:
        found: dict[str, Held] = {}
        called: dict[str, str] = {}  # checkpoint name -> trainer's name
        owner: dict[Any, tuple[str, str | tuple[Part, ...]]] = {}
        aliases: dict[str, str] = {}
        wires = _fsdp_dtypes(self._module) if self._module is not None else {}
        naming = self._naming([(name, tuple(tensor.shape)) for name, tensor, _ in named])
        for trainer_name, tensor, parameter in named:
            rule = naming(trainer_name, tuple(tensor.shape))
            if rule is None:
                continue
            names = [rule] if isinstance(rule, str) else [part.name for part in rule]
            identity = _storage(tensor)
            if identity in owner:
                aliases.update(_aliases(trainer_name, rule, *owner[identity]))
                continue
            for name in names:
                if (other := called.setdefault(name, trainer_name)) != trainer_name:
                    raise PublishError(
                        f"two different tensors are named {name!r} ({other!r} and {trainer_name!r}): check `names`"
                    )
            key = rule if isinstance(rule, str) else _key(trainer_name, tensor, rule)
            if key in found:
                raise PublishError(f"two different tensors are named {key!r}: check `names`")
            wire = self._wire(trainer_name, names, tensor, wires.get(id(tensor)))
            computed = wires.get(id(tensor), tensor.dtype)
            kept = not parameter or self._wide(trainer_name)
            parts = None if isinstance(rule, str) else rule
            held = _checked(Held(key, tensor, wire, parameter, computed, kept, parts))
            found.update((h.name, h) for h in _unpacked(held))
            owner[identity] = (trainer_name, rule)
        self.aliases = aliases
        return list(found.values())

    def _naming(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]]
    ) -> Callable[[str, tuple[int, ...]], str | tuple[Part, ...] | None]:
        """The rule for each trainer's name. Rules are asked once; whether adapters are merged, every time."""
        if self._shapes != shapes:
            self._shapes, self._decided = list(shapes), {}
            self._rules = None
        if callable(self._names):
            return self._by_function
        if self._rules is None:
            self._rules = checkpoint_rules(self._module, dict(shapes))
            self._adapters = adapter_names(self._module) if self._module is not None else {}
        elif self._adapters and self._module is not None:
            # The other rules cannot change while names and shapes stay.
            self._adapters = adapter_names(self._module)
        return self._by_rules

    def _by_function(self, name: str, shape: tuple[int, ...]) -> str | tuple[Part, ...] | None:
        assert callable(self._names)
        if name not in self._decided:
            self._decided[name] = checked(name, shape, self._names(name))
        return self._decided[name]

    def _by_rules(self, name: str, shape: tuple[int, ...]) -> str | tuple[Part, ...] | None:
        if isinstance(self._names, Mapping) and name in self._names:
            if name not in self._decided:
                self._decided[name] = checked(name, shape, self._names[name])
            return self._decided[name]
        assert self._rules is not None
        rule = self._rules[name]
        now = self._adapters.get(name, rule)
        if isinstance(now, Refusal):
            raise PublishError(now.why)
        if now is None:
            return None
        if isinstance(rule, Refusal):
            raise PublishError(rule.why)
        return rule

    def _named(self) -> Iterable[tuple[str, Any, bool]]:
        if self._module is None:
            yield from ((name, tensor, True) for name, tensor in self._pairs)
            return
        module = self._module
        _reshard(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield name, parameter, True
        for prefix, child in module.named_modules():
            for name, buffer in child.named_buffers(recurse=False):
                if name not in child._non_persistent_buffers_set:
                    yield f"{prefix}.{name}" if prefix else name, buffer, False

    def _wire(
        self, trainer_name: str, names: Sequence[str], tensor: torch.Tensor, trained: torch.dtype | None
    ) -> torch.dtype:
        key = (trainer_name, tensor.dtype, trained)
        if (known := self._wires.get(key)) is not None:
            return known
        default = trained or tensor.dtype
        chosen: set[torch.dtype] = set()
        if isinstance(self._dtype, torch.dtype):
            chosen = {self._dtype if tensor.dtype.is_floating_point else default}
        elif isinstance(self._dtype, Mapping):
            by_tensor = self._dtype.get(trainer_name) or default
            chosen = {self._dtype.get(name) or by_tensor for name in names}
        elif self._dtype is not None:
            chosen = {self._dtype(name, tensor) or default for name in names}
        if len(chosen) > 1:
            raise PublishError(
                f"the checkpoint parameters in {trainer_name!r} ({names[0]!r} ...) are to travel as "
                f"{' and '.join(sorted(map(str, chosen)))}: what is stacked in one tensor travels in one dtype"
            )
        wire = chosen.pop() if chosen else default
        if wire.is_floating_point != tensor.dtype.is_floating_point:
            name = names[0] if len(names) == 1 else trainer_name
            raise PublishError(f"parameter {name!r} is {tensor.dtype} and cannot travel as {wire}")
        self._wires[key] = wire
        return wire


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the local part of a tensor is in memory, and in what form."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def checkpoint_rules(module: nn.Module | None, shapes: Shapes) -> dict[str, Rule]:
    """For each trainer's tensor (plain name -> whole shape) what the checkpoint calls it, by the rules: those of
    transformers for a model of it, without what wrappers and adapters put into names.

    Raises `PublishError` for a module with several transformers models.
    """
    adapters = adapter_names(module) if module is not None else {}
    base = {name: _base_name(name, adapters, module) for name in shapes}
    rules: dict[str, Rule] = {}
    inside: dict[str, Rule] = {}
    found = one_model(module) if module is not None else None
    if found is not None:
        path, model = found
        prefix = path + "." if path else ""
        within = {base[n]: shape for n, shape in shapes.items() if base[n].startswith(prefix)}
        inside = add_prefix(
            family_rules(model, {name.removeprefix(prefix): shape for name, shape in within.items()}), path
        )
    for name in shapes:
        rules[name] = adapter_leftover(name) or inside.get(base[name], base[name])
    return rules


def _base_name(name: str, adapters: Mapping[str, Any], module: nn.Module | None) -> str:
    if module is None:
        return without_adapter(name)
    named = adapters.get(name, name)
    return named if isinstance(named, str) else name


def checkpoint_names(module: nn.Module) -> Callable[[str], str | None | list[tuple[str, Any, Any]]]:
    """The built-in rules for a module as a `names` function, to be called from one of the user's.

        rules = checkpoint_names(model)
        Publisher(model, names=lambda name: None if name.startswith("v_head.") else rules(name))

    It raises `PublishError` for a name that the rules refuse.
    """
    sources = Sources(module)
    shapes = {plain_name(name): tuple(tensor.shape) for name, tensor, _ in sources._named()}
    naming = sources._naming(list(shapes.items()))

    def names(name: str) -> str | None | list[tuple[str, Any, Any]]:
        if name not in shapes:
            raise PublishError(f"the module has no tensor called {name!r}")
        said = naming(name, shapes[name])
        return [(p.name, p.at, p.shape) for p in said] if isinstance(said, tuple) else said

    return names


def _key(name: str, tensor: torch.Tensor, parts: tuple[Part, ...]) -> str:
    """What a tensor of several parameters is called in the snapshot. A plain tensor may hold other experts on each
    rank under one trainer's name, so what it holds belongs to its name."""
    return name if isinstance(tensor, DTensor) else f"{name}:{parts[0].name}"


def _aliases(
    name: str, rule: str | tuple[Part, ...], owner: str, owned: str | tuple[Part, ...]
) -> dict[str, str]:
    """Checkpoint names of a tied tensor -> those under which it is sent. Raises `PublishError`."""
    if isinstance(rule, str) and isinstance(owned, str):
        return {rule: owned} if rule != owned else {}
    sent = {(p.at, p.shape): p.name for p in owned} if isinstance(owned, tuple) else {}
    if isinstance(rule, str) or any((p.at, p.shape) not in sent for p in rule):
        raise PublishError(
            f"{name!r} and {owner!r} are one tensor, but `names` cuts them differently: cut both alike, or give "
            "one of them None"
        )
    return {p.name: sent[p.at, p.shape] for p in rule if p.name != sent[p.at, p.shape]}


def _packed(tensor: DTensor) -> int | None:
    """Which placement cuts each of several parts of the tensor by itself: a strided shard with nothing inside."""
    mesh, placements = tensor.device_mesh, tensor.placements
    for at, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            dim = placement.dim % tensor.ndim
            others = [p for i, p in enumerate(placements) if i != at and not isinstance(p, TorchReplicate)]
            alone = all(getattr(p, "dim", dim) % tensor.ndim != dim for p in others)
            even = tensor.shape[dim] % (int(placement.split_factor) * mesh.size(at)) == 0
            return at if alone and even else None
    return None


def _unpacked(held: Held) -> list[Held]:
    """The parts of a packed tensor that are sharded by themselves, as tensors of their own.

    As it is where it is not packed, or where a checkpoint parameter reaches over several parts: then `merge` refuses
    its layout.
    """
    at = _packed(held.tensor) if isinstance(held.tensor, DTensor) else None
    if at is None or held.parts is None:
        return [held]
    placement: Any = held.tensor.placements[at]  # type: ignore[attr-defined]
    dim, n = placement.dim % held.tensor.ndim, int(placement.split_factor)
    size = held.tensor.shape[dim] // n
    inside: list[list[Part]] = [[] for _ in range(n)]
    for part in held.parts:
        i = part.at[dim] // size
        if part.region.stop[dim] > (i + 1) * size:
            return [held]
        moved = tuple(a - i * size if d == dim else a for d, a in enumerate(part.at))
        inside[i].append(Part(part.name, moved, part.shape))
    return [
        replace(held, name=f"{held.name}#{i}", parts=tuple(parts), packed=(dim, i, n))
        for i, parts in enumerate(inside)
        if parts
    ]


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
        shape = _local_shape(held.tensor.shape, mesh, held.tensor.placements)
        if shape != tuple(local.shape):
            raise PublishError(
                f"parameter {name!r}: this rank holds {tuple(local.shape)}, its placements "
                f"{held.tensor.placements} on a mesh of {tuple(mesh.shape)} say {tuple(shape)}"
            )
    elif local.numel() and local.untyped_storage().size() == 0:
        raise PublishError(f"parameter {name!r} has no storage: it was freed after a forward pass")
    return held


@lru_cache(maxsize=4096)
def _local_shape(shape: torch.Size, mesh: Any, placements: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(compute_local_shape_and_global_offset(shape, mesh, placements)[0])


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
        state: Any = child._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.13: at most one
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for group in groups:
            # Of the group's policy: the parameters' own attribute exists only after the first forward pass.
            wire = group.mp_policy.param_dtype
            for param in group.fsdp_params:
                if wire is not None and param.sharded_param.dtype.is_floating_point:
                    found[id(param.sharded_param)] = wire
    return found


FINGERPRINT_ELEMENTS = 4096


def fingerprint(held: Held) -> str | None:
    """Of a plain parameter: its first elements, as a hash; None for DTensors and buffers.

    Ranks that hold different values under one name (experts of expert parallelism, a slice cut by hand) are
    found by it: such a tensor must be a DTensor, or have a name of its own.
    """
    if isinstance(held.tensor, DTensor) or not held.parameter:
        return None
    head = held.local.flatten()[:FINGERPRINT_ELEMENTS].contiguous().cpu()
    return hashlib.blake2b(head.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
