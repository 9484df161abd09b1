"""Checkpoint names of transformers' models, by the library's own tables.

Since transformers 5 a live model may be named and stacked otherwise than its checkpoint (`experts.gate_up_proj
[E, 2I, H]` for `experts.N.gate_proj.weight` and `experts.N.up_proj.weight`). What `save_pretrained` does to get
back is run here as it is, on tensors without values that remember which part of which tensor they are. Whatever
is a region of one tensor afterwards can be sent; whatever was transposed, permuted, joined or computed cannot,
and is refused by name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..layout.boxes import Box
from .handle import PublishError
from .naming import Part, Refusal, Rule, Shapes, plain_name

_WHAT_TO_DO = (
    "give it a checkpoint name, regions or None in `names`, or publish (checkpoint name, tensor) pairs that the "
    "trainer has brought into the checkpoint's form"
)


def pretrained_models(module: nn.Module) -> dict[str, nn.Module]:
    """The topmost transformers models in a module: plain path -> model. Empty without transformers."""
    library = sys.modules.get("transformers.modeling_utils")  # whoever has a model of it has imported it
    if library is None:
        return {}
    found: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        if isinstance(child, library.PreTrainedModel):
            path = plain_name(path)
            if not any(path == f or f == "" or path.startswith(f + ".") for f in found):
                found[path] = child
    return found


def family_rules(model: nn.Module, shapes: Shapes) -> dict[str, Rule]:
    """For the tensors of a transformers model (names inside it): what its checkpoint calls them.

    `shapes`: of the whole tensors, for every parameter and persistent buffer that is here; a model may be a
    pipeline stage that lacks some.
    """
    if getattr(model, "hf_quantizer", None) is not None and not _dequantized(model):
        why = (
            f"the {_class_of(model).__name__} is quantised by transformers: train the weights unquantised (or "
            "load them with dequantize=True), or say in `names` what each tensor is called"
        )
        return dict.fromkeys(shapes, Refusal(why))
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    rules: dict[str, Rule] = dict.fromkeys(unsaved & shapes.keys())
    probed = {name: shape for name, shape in shapes.items() if name not in unsaved}
    rules.update(_reverted(model, probed))
    return rules


def _dequantized(model: Any) -> bool:
    config = getattr(model.hf_quantizer, "quantization_config", None)
    return bool(getattr(config, "dequantize", False))


def _reverted(model: Any, shapes: Shapes) -> dict[str, Rule]:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 the live names are the checkpoint's, but for models with a table
        if getattr(model, "_checkpoint_conversion_mapping", None):
            why = f"this version of transformers renames {_class_of(model).__name__}'s tensors: use version 5, or"
            return {name: Refusal(f"{name!r}: {why} {_WHAT_TO_DO}") for name in shapes}
        return {name: name for name in shapes}
    bases = {name: torch.empty(shape, device="meta").as_subclass(_Probe) for name, shape in shapes.items()}
    names = {_storage(base): name for name, base in bases.items()}
    try:
        reverted = revert_weight_conversion(_Stub(model), dict(bases))
    except Exception as e:
        why = (
            f"transformers' own way back to the checkpoint of {_class_of(model).__name__} failed "
            f"({type(e).__name__}: {str(e)[:300]}): {_WHAT_TO_DO}"
        )
        return {name: Refusal(f"{name!r}: {why}") for name in shapes}
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    refused: dict[str, str] = {}
    joined: list[str] = []
    for checkpoint_name, tensor in reverted.items():
        base = names.get(_storage(tensor))
        if base is None:
            joined.append(checkpoint_name)
        elif (part := _part(checkpoint_name, tensor, shapes[base])) is None:
            refused[base] = f"is transposed, permuted or reshaped in the checkpoint's {checkpoint_name!r}"
        else:
            parts[base].append(part)
    rules: dict[str, Rule] = {}
    for name, shape in shapes.items():
        found = parts[name]
        if name in refused:
            rules[name] = Refusal(
                f"{name!r} {refused[name]}, and only regions of it can travel: {_WHAT_TO_DO}"
            )
        elif sum(math.prod(p.shape) for p in found) != math.prod(shape) or not found:
            into = f" (one of {', '.join(map(repr, joined[:3]))})" if joined else ""
            rules[name] = Refusal(
                f"{name!r} is joined with other tensors or computed with in the checkpoint{into}, and only "
                f"regions of it can travel: {_WHAT_TO_DO}"
            )
        elif len(found) == 1 and found[0].shape == shape:
            rules[name] = found[0].name
        else:
            rules[name] = tuple(found)
    return rules


class _Probe(torch.Tensor):
    """A tensor on the meta device whose views can be recognised after any operation; it is never copied for the
    sake of its strides alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.contiguous:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _part(name: str, tensor: torch.Tensor, whole: tuple[int, ...]) -> Part | None:
    """Which region of a contiguous tensor of shape `whole` a view of it is; None if it is none."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    leading = len(whole) - len(shape)
    if leading < 0:
        return None
    base: list[int] = []
    step = 1
    for extent in reversed(whole):
        base.insert(0, step)
        step *= extent
    at = []
    for stride in base:
        at.append(offset // stride if stride else 0)
        offset -= at[-1] * stride
    for extent, stride, own in zip(shape, strides, base[leading:], strict=True):
        if extent > 1 and stride != own:
            return None
    part = Part(name, tuple(at), shape)
    return part if Box.whole(whole).contains(part.region) else None


class _Stub:
    """What transformers' reversal asks of a model, answered for one that is sharded."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.base_model_prefix = model.base_model_prefix
        self._model = model
        # Those of loading, where the checkpoint was in the original form; else, as for a new model, the tables.
        self._weight_conversions = getattr(model, "_weight_conversions", None) or self._tables()

    def _tables(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        # As `save_pretrained` does for a model that was not loaded: nobody knows whether the prefix was there.
        tables = get_model_conversion_mapping(self, add_legacy=False)
        return [table for table in tables if not isinstance(table, PrefixChange)]

    def named_modules(self) -> Any:
        """Models inside the model, each as an empty one of the class that it had before FSDP changed its name: the
        tables go by the names of classes."""
        for path, child in self._model.named_modules():
            if hasattr(child, "config") and hasattr(type(child), "is_custom_code"):
                empty = object.__new__(_class_of(child))
                empty.__dict__["config"] = child.config
                yield plain_name(path), empty

    def get_parameter(self, name: str) -> Any:
        """Asked for by conversions that transpose only where shapes differ from the live ones. The checkpoints that
        need it are transposed, so: always."""
        return _OtherShape


class _OtherShape:
    shape = None


def _class_of(model: nn.Module) -> Any:
    from torch.distributed.fsdp import FSDPModule

    cls = type(model)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) and cls.__mro__[1] is FSDPModule else cls


def add_prefix(rules: Mapping[str, Rule], path: str) -> dict[str, Rule]:
    """The same rules for a model that is found at `path` in the trainer's module."""
    return {f"{path}.{name}" if path else name: rule for name, rule in rules.items()}


def one_model(module: nn.Module) -> tuple[str, nn.Module] | None:
    """The transformers model in a module, with its path; None if there is none. Raises `PublishError` for two."""
    found = pretrained_models(module)
    if len(found) > 1:
        raise PublishError(
            f"the module holds {len(found)} transformers models ({', '.join(sorted(found))}): pass the one whose "
            "weights the servers are to have, or say in a `names` function what each tensor is called"
        )
    return next(iter(found.items()), None)
