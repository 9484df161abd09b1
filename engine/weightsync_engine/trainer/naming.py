"""From the trainer's names to the checkpoint's: which checkpoint parameters a trainer's tensor holds.

A rule answers for a trainer's name with a checkpoint name (the whole tensor), None (not sent), or regions: a
tensor that stacks several checkpoint parameters, or holds one with padding around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..layout.boxes import Box
from ..layout.tensors import region_at
from .handle import PublishError

Region = tuple[str, Sequence[int], Sequence[int]]
"""(checkpoint name, where it begins in the trainer's whole tensor, shape of the checkpoint parameter). The shape
may lack leading dimensions of the tensor; the region has extent 1 in those."""
Named = str | None | Sequence[Region]
Names = Callable[[str], Named] | Mapping[str, Named] | None
"""Trainer's name -> what it is called in the checkpoint.

A function decides on every name. A mapping decides on the names that it has, the others go by the rules for
transformers' models and for adapters (`checkpoint_names`).
"""

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Parts of dotted names that wrappers put in and checkpoints do not have."""


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint parameter inside a trainer's tensor, counted in the whole tensor."""

    name: str
    at: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def region(self) -> Box:
        return region_at(self.at, self.shape)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tensor cannot be sent under the rules, and what to do; raised only if it would be sent."""

    why: str


Rule = str | None | tuple[Part, ...] | Refusal
Shapes = Mapping[str, tuple[int, ...]]
"""Trainer's name -> shape of the whole tensor."""


def plain_name(name: str) -> str:
    """Without what torch.compile, checkpointing and FSDP1 put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def checked(trainer_name: str, shape: tuple[int, ...], named: Any) -> str | None | tuple[Part, ...]:
    """A rule's answer for a tensor of that shape. Raises `PublishError` naming the tensor for nonsense."""
    if named is None or (isinstance(named, str) and named):
        return named
    where = f"`names` gives for {trainer_name!r}"
    if isinstance(named, str) or not isinstance(named, Sequence) or not named:
        raise PublishError(
            f"{where} {named!r}: expected a checkpoint name, None, or a list of (checkpoint name, at, shape)"
        )
    whole, parts = Box.whole(shape), []
    for region in named:
        if isinstance(region, Part):
            part = region
        else:
            try:
                name, at, extent = region
                part = Part(name, tuple(int(n) for n in at), tuple(int(n) for n in extent))
            except (TypeError, ValueError):
                raise PublishError(f"{where} {region!r}: expected (checkpoint name, at, shape)") from None
        if not isinstance(part.name, str) or not part.name:
            raise PublishError(f"{where} a region called {part.name!r}: expected a checkpoint name")
        fits = len(part.at) == len(shape) >= len(part.shape) and min(part.at + part.shape, default=0) >= 0
        if not fits or not whole.contains(part.region):
            raise PublishError(
                f"{where} {part.name!r} of shape {part.shape} at {part.at}, which is not inside the tensor's "
                f"shape {shape}"
            )
        parts.append(part)
    _check_apart(where, parts)
    return tuple(parts)


def _check_apart(where: str, parts: Sequence[Part]) -> None:
    """Two checkpoint parameters on the same elements are a slip in a table, and their names too."""
    if len({part.name for part in parts}) < len(parts):
        name = next(p.name for i, p in enumerate(parts) if p.name in {q.name for q in parts[:i]})
        raise PublishError(f"{where} two regions called {name!r}")
    near: list[Part] = []  # those that reach into the rows at hand
    for part in sorted(parts, key=lambda p: p.at):
        if part.region.size == 0:
            continue
        near = [p for p in near if not p.at or p.region.stop[0] > part.at[0]]
        for other in near:
            if part.region.intersect(other.region) is not None:
                raise PublishError(f"{where} regions that overlap: {other.name!r} and {part.name!r}")
        near.append(part)


# ---- adapters ----------------------------------------------------------------------------------------------

_ADAPTERS = frozenset(
    {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector", "lora_bias"}
)


def _unmerged(name: str) -> Refusal:
    return Refusal(
        f"{name!r} belongs to an adapter that is not merged into its base weight, so the servers would get the "
        "base weights without it: merge it before publishing (PEFT's merge_adapter() or merge_and_unload()), or "
        "send it as an adapter by vLLM's own LoRA loading"
    )


def adapter_names(module: nn.Module) -> dict[str, str | None | Refusal]:
    """For the tensors that adapters (PEFT) wrap or add: the name without them, None, or why not.

    Decided per layer: only some layers of a model have an adapter. Keys are plain names of the trainer. Read
    anew at every publish, as adapters are merged and unmerged in between.
    """
    found: dict[str, str | None | Refusal] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        prefix = plain_name(path) + "." if plain_name(path) else ""
        if "base_layer" in layer._modules:
            whole, base = _is_merged(layer), layer._modules["base_layer"]
            innermost = base is not None and "base_layer" not in base._modules
            # One layer may wrap another: adapters of several parameters of one module do.
            original = prefix
            while original.endswith("base_layer."):
                original = original.removesuffix("base_layer.")
            for name in _tensors(layer):
                inner = name.removeprefix("base_layer.")
                if inner == name:
                    found[prefix + name] = None if whole else _unmerged(prefix + name)
                elif innermost:
                    found[prefix + name] = original + inner
        elif "modules_to_save" in layer._modules and "original_module" in layer._modules:
            copies = layer._modules["modules_to_save"]
            active = getattr(layer, "active_adapter", None) or list(copies._modules if copies else ())
            active = [active] if isinstance(active, str) else list(active)
            for name in _tensors(layer):
                kind, _, rest = name.partition(".")
                adapter, _, inner = rest.partition(".")
                if kind == "modules_to_save" and len(active) > 1:
                    found[prefix + name] = Refusal(
                        f"{prefix + name!r} is one of {len(active)} copies of a layer that adapters save: "
                        "activate one adapter alone before publishing"
                    )
                else:
                    found[prefix + name] = (
                        prefix + inner if kind == "modules_to_save" and adapter in active else None
                    )
    return found


def _tensors(layer: nn.Module) -> Iterator[str]:
    for name, _ in layer.named_parameters(remove_duplicate=False):
        yield plain_name(name)
    for name, _ in layer.named_buffers(remove_duplicate=False):
        yield plain_name(name)


def _is_merged(layer: nn.Module) -> bool:
    """Whether all active adapters of a PEFT layer are in its base weight at the moment."""
    merged = getattr(layer, "merged_adapters", None)
    if merged is None:
        return bool(getattr(layer, "merged", False))
    active = getattr(layer, "active_adapters", merged)
    active = [active] if isinstance(active, str) else active
    return bool(merged) and set(active) <= set(merged)


def adapter_leftover(name: str) -> Refusal | None:
    """For a name that no adapter layer claimed and that is one of an adapter's all the same."""
    return _unmerged(name) if not _ADAPTERS.isdisjoint(name.split(".")) else None


def without_adapter(name: str) -> str:
    """What PEFT puts into the names of base weights, taken out; for tensors given by name alone."""
    return ".".join(p for p in name.removeprefix("base_model.model.").split(".") if p != "base_layer")
