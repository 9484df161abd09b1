"""Runs vLLM's own loader again, for the parameters that cannot be written directly.

One `load_weights` of the model over whole parameters, one after the other. Modules whose weights are processed
after load go through vLLM's layerwise reload meanwhile, and only those: nothing else of the model is touched.
Whether that is right on this platform is not believed but tried, before the first round: with the values of the
checkpoint that is live already, after which the live tensors must be what they were, where they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .fallback import Rerunnable


class LoaderError(Exception):
    """vLLM's loader failed or did not do all; says at which parameter."""


class ModelLoader:
    """What a model's loader is run for.

    Args:
        model: the worker's part of the model.
        groups: what is loaded.
        config: vLLM's `VllmConfig`, of which a reload needs the model's part. None: only models whose weights are
            not processed after load.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Rerunnable], config: Any = None) -> None:
        self._model, self._config = model, config
        self.groups = tuple(groups)
        self.names = tuple(sorted({name for group in groups for name in group.names}))
        self._modules = tuple(sorted({path for group in groups for path in group.modules}))
        self._loaded: set[str] | None = None
        self._memory: dict[str, int] = {}

    def load(self, whole: Callable[[str], torch.Tensor]) -> None:
        """Load every name once, from what `whole` gives for it, in one `load_weights`. `whole` is asked for one
        parameter at a time, and what it gives may be written to.

        Raises `LoaderError`. The live tensors of the groups are then undefined.
        """
        at, ended = "", False

        def each() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at, ended
            for at in self.names:
                yield at, whole(at)
            ended = True

        load_weights: Any = self._model.load_weights
        try:
            with self._vllm(), torch.no_grad(), self._session():
                loaded = load_weights(each())
        except Exception as e:
            where = (
                f"after {at}, the last parameter" if ended else f"at {at}" if at else "before any parameter"
            )
            raise LoaderError(f"vLLM's loader failed {where}: {type(e).__name__}: {str(e)[:400]}") from e
        if not ended:
            raise LoaderError(f"vLLM's loader stopped at {at} and left the rest unread")
        self._check(None if loaded is None else set(loaded))

    def _check(self, loaded: set[str] | None) -> None:
        """It loaded what it loaded in the rehearsal, to the same places."""
        if self._loaded is not None and loaded is not None and (less := self._loaded - loaded):
            raise LoaderError(f"vLLM's loader did not load {min(less)}, which it did when it was tried")
        for name, address in self._memory.items():
            if _address(_find(self._model, name)) != address:
                raise LoaderError(
                    f"vLLM's loader moved {name} to other memory, which running kernels do not read"
                )
        self._loaded = loaded

    def unfit(self, group: Rerunnable, planned: bool) -> str:
        """Why a group cannot be loaded again at all; empty: it can be tried."""
        if not callable(getattr(self._model, "load_weights", None)):
            return f"{type(self._model).__name__} has no load_weights to give it to"
        if not group.modules or planned:
            return ""
        if self._config is None:
            return "its layer must be reloaded, for which vLLM's configuration is not known"
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        for path in group.modules:
            for below, module in self._model.get_submodule(path).named_modules(prefix=path):
                if module not in LAYERWISE_INFO:
                    return f"vLLM kept no record of {below} as it was before its weights were processed"
        return ""

    def rehearse(self, whole: Callable[[str], torch.Tensor]) -> dict[Rerunnable, str]:
        """Load what is live already, over live tensors that were made wrong before; they must become what they
        were. Whatever happens, they are afterwards what they were.

        Args:
            whole: as for `load`: the values that the live tensors were loaded from.
        Returns:
            The groups for which vLLM's loader does not do that, each with what happened.
        """
        paths = {name.rpartition(".")[0] for group in self.groups for name in group.live}
        had = _registered(self._model.get_submodule(path) for path in sorted(paths))
        kept = {name: tensor for group in self.groups for name, tensor in self._tensors(group)}
        before = {name: tensor.detach().clone() for name, tensor in kept.items()}
        addresses = {name: _address(tensor) for name, tensor in kept.items()}
        failed: dict[Rerunnable, str] = {}
        try:
            for group in self.groups:
                for name in group.live:
                    _spoil(kept[name])
            self.load(whole)
            for group in self.groups:
                for name, tensor in self._tensors(group):
                    if _address(tensor) != addresses.get(name):
                        failed[group] = f"moves {name} to other memory, which running kernels do not read"
                    elif not _equal(tensor, before[name]):
                        failed[group] = f"leaves other values in {name}"
                    if group in failed:
                        break
        except LoaderError as e:
            failed = dict.fromkeys(self.groups, str(e).removeprefix("vLLM's loader "))
        finally:
            if failed:
                _put_back(had)
            with torch.no_grad():
                for name, tensor in kept.items():
                    if not _equal(tensor, before[name]):
                        tensor.data.copy_(before[name])
        if not failed:
            self._memory = {name: addresses[name] for group in self.groups for name in group.live}
        return {
            group: f"vLLM's own loader cannot be used: run again with the checkpoint's own values, it {what}"
            for group, what in failed.items()
        }

    def _tensors(self, group: Rerunnable) -> Iterator[tuple[str, torch.Tensor]]:
        """The group's live tensors, and all that reloaded modules keep."""
        for name in group.live:
            yield name, _find(self._model, name)
        for path in group.modules:
            for below, module in self._model.get_submodule(path).named_modules(prefix=path):
                held = {**vars(module), **module._parameters, **module._buffers}
                kernel = getattr(module, "impl", None)
                held |= {f"impl.{n}": t for n, t in getattr(kernel, "__dict__", {}).items()}
                for leaf, tensor in held.items():
                    if isinstance(tensor, torch.Tensor) and f"{below}.{leaf}" not in group.live:
                        yield f"{below}.{leaf}", tensor

    @contextlib.contextmanager
    def _vllm(self) -> Iterator[None]:
        if self._config is None:
            yield
            return
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._config):
            yield

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """vLLM's layerwise reload, of the groups' modules. On a failure the modules get back the tensors that they
        had, whatever is in them."""
        if not self._modules:
            yield
            return
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            get_layerwise_info,
            initialize_layerwise_reload,
        )

        roots = [self._model.get_submodule(path) for path in self._modules]
        had = _registered(module for root in roots for module in root.modules())
        try:
            for root in roots:
                initialize_layerwise_reload(root)
            yield
            for root in roots:
                finalize_layerwise_reload(root, self._config.model_config)
        except BaseException:
            for module, _, _ in had:
                get_layerwise_info(module).reset()
            _put_back(had)
            raise
        finally:
            # A loader left wrapped would ignore what it is given outside of a reload.
            for _, parameters, buffers in had:
                for tensor in (*parameters.values(), *buffers.values()):
                    loader = getattr(tensor, "weight_loader", None)
                    while getattr(loader, "__name__", "") == "online_process_loader":
                        loader = loader.__wrapped__  # type: ignore[union-attr]
                        tensor.weight_loader = loader  # type: ignore[union-attr]


_Registered = list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]]


def _registered(modules: Iterable[nn.Module]) -> _Registered:
    """The modules, once each, with the tensors that they own."""
    every = {id(module): module for module in modules}
    return [(module, dict(module._parameters), dict(module._buffers)) for module in every.values()]


def _put_back(had: _Registered) -> None:
    for module, parameters, buffers in had:
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)


def _find(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf, None)
    if not isinstance(tensor, torch.Tensor):
        raise LoaderError(f"vLLM's loader removed {name}")
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def _spoil(tensor: torch.Tensor) -> None:
    """Every element becomes another one."""
    if tensor.is_contiguous():
        tensor.detach().reshape(-1).view(torch.uint8).bitwise_not_()
    else:
        tensor.detach().zero_()
