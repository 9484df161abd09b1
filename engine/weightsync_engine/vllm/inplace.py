"""Commit in place: the slab is the live storage, so that the mover writes the weights that the server computes with.

Nothing is copied at the flip, and no second copy of the weights exists. The price: the scheduler stands still for the
whole transfer, and one that fails leaves weights of no one version. That is a fact kept here, in the process that
holds the weights: what was written since the last flip is torn, until a flip finds it verified.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..mover.slab import Slab
from ..protocol.messages import Problem, Published
from ..protocol.names import ENV_COMMIT, STAGED
from ..resolve.manifest import Resolved
from .shadow import Flipped

log = logging.getLogger(__name__)


class NotInPlace(ValueError):
    """This model's weights cannot be the mover's target; says which tensor and why."""


def refusal(config: Any) -> str:
    """Why a server with this `VllmConfig` cannot be updated in place; empty: nothing in it speaks against."""
    why = ""
    if config.model_config.enable_sleep_mode:
        why = "with sleep mode vLLM gives its weights' memory away"
    speculative = config.speculative_config
    if speculative is not None and getattr(speculative, "draft_model_config", None) is not None:
        why = "a draft model may compute with the same memory"
    return _instead(why) if why else ""


def unfit(resolved: Resolved) -> str:
    """Why a resolved model cannot be updated in place; empty: as far as it tells, it can."""
    for name, reason in resolved.manifest.fallback.items():
        return _instead(f"{name} goes through vLLM's own loader, as {reason}")
    for double in resolved.doubles:
        return _instead(f"{double.name} gets what is received for {double.tensor}")
    for name in sorted(resolved.shared):
        return _instead(f"{name} also holds what weightsync does not write")
    for name, live in resolved.views.items():
        if not live.is_contiguous():
            return _instead(f"{name} is not contiguous")
    return ""


def _instead(why: str) -> str:
    return f"{why}: an update in place is not possible, use {ENV_COMMIT}={STAGED}"


def live_bytes(resolved: Resolved) -> int:
    """Of the memory that the slab takes the place of."""
    return sum(live.numel() * live.element_size() for live in resolved.views.values())


class InPlace:
    """The live weights in the slab. Its mover writes them; `flip` only says which version they are."""

    def __init__(self, resolved: Resolved, slab: Slab, model: nn.Module) -> None:
        """Move the live weights into the slab, before anything keeps their addresses (profiling, compilation, CUDA
        graphs). Raises `NotInPlace`, and the model is as before, where something else keeps using the old memory."""
        self.slab = slab
        self.live: Flipped | None = None
        """None: the weights that vLLM loaded at its start."""
        self.seconds = 0.0
        self._count = slab.count
        """The slab's, when the live weights were last known to be of one version."""
        self._places = _move(resolved, slab, model)

    @property
    def torn(self) -> bool:
        """The mover has begun to write since the last flip, whatever became of it."""
        return self.slab.count != self._count

    def flip(self, want: Flipped) -> Problem | None:
        """Say that the live weights are `want`, if that is what was written and verified. Repeated calls answer as the
        first. A problem leaves the weights torn, as they are."""
        if self.live == want and not self.torn:
            return None
        count, stamp = self.slab.count, self.slab.read_stamp()
        if stamp != Published(version=want.version, sequence=want.round) or count != self.slab.count:
            held = "nothing whole" if stamp is None else f"{stamp.version} of round {stamp.sequence}"
            return Problem(
                reason="WeightsNotVerified",
                message=f"the live weights are {held}, not the verified {want.version} of round {want.round}; they are "
                "of no one version until a whole round succeeds",
            )
        for place in self._places:
            if place.address != place.new.data_ptr():
                return Problem(
                    reason="FlipNotExact",
                    message=f"{place.name} is not where the mover writes any more: restart this server",
                )
        self.live, self._count = want, count
        log.info("the live weights are %s", want.version)
        return None


@dataclass(frozen=True)
class _Where:
    """A tensor's place in its storage, without a tensor that would keep it."""

    storage: torch.UntypedStorage
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Where:
        return cls(
            tensor.untyped_storage(),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )

    @property
    def key(self) -> int:
        return int(self.storage._cdata)

    def tensor(self) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage, self.offset, self.shape, self.stride)

    def inside(self, other: _Where) -> bool:
        """Whether it lies in a contiguous one of the same storage."""
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (
            self.dtype == other.dtype
            and other.offset <= self.offset <= last < other.offset + other.shape.numel()
        )


@dataclass(frozen=True)
class _Moved:
    name: str
    old: _Where
    new: torch.Tensor
    tensor: torch.Tensor | None
    """A parameter or buffer, which stays the object that it is."""
    attributes: dict[str, Any]
    """Else the module's, of which one is replaced: a view would keep what it is a view of."""

    def there(self) -> None:
        self._put(self.new)

    def back(self) -> None:
        self._put(self.old.tensor())

    def _put(self, where: torch.Tensor) -> None:
        if self.tensor is not None:
            self.tensor.data = where
        else:
            self.attributes[self.name.rpartition(".")[2]] = where

    @property
    def address(self) -> int:
        tensor = self.attributes.get(self.name.rpartition(".")[2]) if self.tensor is None else self.tensor
        return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0


def _move(resolved: Resolved, slab: Slab, model: nn.Module) -> list[_Moved]:
    """Every tensor of the model that lies in the resolved memory, now in the slab."""
    new = {name: slab.tensor(resolved.manifest.tensors[name]) for name in resolved.views}
    old = {name: _Where.of(live) for name, live in resolved.views.items()}
    moves = _moves(model, old, new)
    for name, view in new.items():
        view.copy_(old[name].tensor())
    resolved.views.update(new)
    for move in moves:
        move.there()
    if (kept := _still_used(old)) is not None:
        for move in moves:
            move.back()
        resolved.views.update({name: where.tensor() for name, where in old.items()})
        raise NotInPlace(_instead(f"something beside the model's tensors computes with the memory of {kept}"))
    return moves


def _moves(model: nn.Module, old: dict[str, _Where], new: dict[str, torch.Tensor]) -> list[_Moved]:
    homes: dict[int, list[str]] = {}
    for name, where in old.items():
        homes.setdefault(where.key, []).append(name)
    moves = []
    for name, tensor, attributes in _tensors(model):
        here = _Where.of(tensor)
        if here.key not in homes:
            continue
        home = next((n for n in homes[here.key] if here.inside(old[n])), None)
        if home is None:
            raise NotInPlace(_instead(f"{name} shares memory with {homes[here.key][0]} and more"))
        if tensor.is_inference():
            raise NotInPlace(_instead(f"{name} was made in inference mode"))
        offset = new[home].storage_offset() + here.offset - old[home].offset
        view = new[home].as_strided(here.shape, here.stride, offset)
        moves.append(
            _Moved(name, here, view, None if name.rpartition(".")[2] in attributes else tensor, attributes)
        )
    return moves


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """Parameters and buffers of all modules, each once, and tensors that are plain attributes: (name, tensor, the
    module's attributes)."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        plain = vars(module)
        for leaf, tensor in {**plain, **module._buffers, **module._parameters}.items():
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel()
                and (leaf in plain or id(tensor) not in seen)
            ):
                seen.add(id(tensor))
                yield f"{path}.{leaf}" if path else leaf, tensor, plain


def _still_used(old: dict[str, _Where]) -> str | None:
    """The first name whose former memory somebody holds beside `old`: a closure, a kernel's own object, a list."""
    for collect in (False, True):
        if collect:
            gc.collect()
        used = [name for name, where in old.items() if torch._C._storage_Use_Count(where.key) > 1]
        if not used:
            return None
    return used[0]
