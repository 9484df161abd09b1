"""A model's rules for names, told by vLLM's own loader instead of by what the model declares.

Draft models rewrite names in code of their own (`model.layers.61.q_a_proj` becomes a part of
`model.layers.61.mtp_block.fused_qkv_a_proj`, `mtp.fc` becomes `model.fc`). So the model's `load_weights` is run once
over the names and shapes of its checkpoint, with a loader on every live tensor that only writes down what it is given.
Nothing is loaded: what is given has no values, and everything is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .loader import alone, kept_as_is
from .names import NameRules


class NotObserved(Exception):
    """The loader could not be watched; says why."""


_Hit = tuple[str, Any]
"""(live tensor, which part of it: None, a number, or q, k or v)"""


def observed_rules(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], config: Any
) -> NameRules:
    """The rules by which the model's own loader finds a place for each of these names.

    Args:
        model: loaded, or of shapes only; unchanged when this returns.
        shapes: by checkpoint name.
        dtypes: likewise; where one is missing, the model's own.
        config: vLLM's `VllmConfig` of the model.
    Raises:
        NotObserved: the loader refuses the names, or reads values.
    """
    load_weights: Any = getattr(model, "load_weights", None)
    if not callable(load_weights):
        raise NotObserved(f"{type(model).__name__} has no load_weights")
    default = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    given = {
        name: torch.empty(shape, dtype=getattr(torch, dtypes.get(name, ""), default), device="meta")
        for name, shape in shapes.items()
    }
    # Whatever a loader cuts or turns what it is given, it stays in the same memory.
    name_of = {tensor.untyped_storage()._cdata: name for name, tensor in given.items()}
    hits: dict[str, set[_Hit]] = {}

    def note(live: str, loaded: torch.Tensor, shard: Any) -> None:
        name = name_of.get(loaded.untyped_storage()._cdata)
        if name is None:
            raise NotObserved(f"{live} is loaded with what was computed from the checkpoint's parameters")
        hits.setdefault(name, set()).add((live, shard))

    from vllm.config import set_current_vllm_config

    try:
        with (
            alone(),
            set_current_vllm_config(config),
            kept_as_is(model),
            _watched(model, note),
            torch.no_grad(),
        ):
            load_weights(iter(given.items()))
    except NotObserved:
        raise
    except Exception as e:
        raise NotObserved(
            f"{type(model).__name__} cannot load them: {type(e).__name__}: {str(e)[:300]}"
        ) from e
    return _rules(hits)


def _rules(hits: Mapping[str, set[_Hit]]) -> NameRules:
    forward: dict[str, str] = {}
    shards: dict[str, dict[Any, str]] = {}
    for name, found in hits.items():
        lives = {live for live, _ in found}
        if all(".routed_experts." in live for live in lives):
            # As it is called below `experts`: which expert and which part of it is for its own layer to say.
            (stem, *others) = {live.partition(".routed_experts.")[0] for live in lives}
            if not others and ".experts." in name:
                forward[name] = f"{stem}.{name.rpartition('.experts.')[2]}"
            continue
        if len(found) != 1:
            continue  # In several places at once: none is told for sure.
        ((live, shard),) = found
        if shard is None:
            forward[name] = live
            continue
        path, _, leaf = live.rpartition(".")
        component = name.rpartition(".")[0].rpartition(".")[2]
        module = ".".join(part for part in (path.rpartition(".")[0], component) if part)
        shards.setdefault(path, {})[shard] = module
        forward[name] = f"{module}.{leaf}"
    packed: dict[str, Sequence[str]] = {}  # by whole paths
    for path, parts in shards.items():
        order = ("q", "k", "v") if set(parts) == {"q", "k", "v"} else tuple(range(len(parts)))
        if set(order) == set(parts):
            packed[path] = tuple(parts[shard] for shard in order)
    return NameRules(packed, forward.get)


@contextlib.contextmanager
def _watched(model: nn.Module, note: Callable[[str, torch.Tensor, Any], None]) -> Iterator[None]:
    """While this lasts, the loaders of all tensors of the model call `note` instead."""
    had: list[tuple[Any, Any]] = []

    def watcher(live: str) -> Callable[..., bool]:
        def load(param: torch.Tensor, loaded_weight: torch.Tensor, *more: Any, **named: Any) -> bool:
            # (param, weight, shard) of a packed layer; of experts (..., name, shard_id=, expert_id=).
            shard = named.get("shard_id", named.get("loaded_shard_id", more[0] if more else None))
            note(live, loaded_weight, shard)
            return True

        return load

    try:
        tensor: Any
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            loader = getattr(tensor, "weight_loader", None)
            tensor.weight_loader = watcher(name)
            had.append((tensor, loader))
        yield
    finally:
        for tensor, loader in had:
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
