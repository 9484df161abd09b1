"""Runs vLLM's own loader again, for the parameters that cannot be written directly.

One `load_weights` of the model over whole parameters, one after the other. Modules whose weights are processed
after load go through vLLM's layerwise reload meanwhile, and only those: nothing else of the model is touched.
Whether that is right on this platform is not believed but tried, before the first round: with the values of the
checkpoint that is live already, after which the live tensors must be what they were, where they were.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

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
        for group in self.groups if self._memory else ():
            for name, tensor in self._tensors(group):
                if _address(tensor) != self._memory.get(name):
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
        had = self._registered()
        kept: dict[str, torch.Tensor] = {}
        held: dict[Rerunnable, list[str]] = {}
        for group in self.groups:
            found = dict(self._tensors(group))
            kept |= found
            held[group] = list(found)
        # In the host's memory: a model that is quantised as a whole has no room for a second one.
        before = {name: tensor.detach().to("cpu", copy=True) for name, tensor in kept.items()}
        addresses = {name: _address(tensor) for name, tensor in kept.items()}
        failed: dict[Rerunnable, str] = {}
        try:
            # What is made from the weights after load is spoilt too: a reload that would leave it as it is must not
            # pass for one that makes it anew.
            for name, tensor in kept.items():
                _spoil(tensor, before[name])
            self.load(whole)
            for group, names in held.items():
                now = dict(self._tensors(group))
                moved = [n for n, t in now.items() if _address(t) != addresses.get(n)]
                gone = [n for n in names if n not in now]
                other = [n for n in names if n in now and not _equal(now[n], before[n])]
                if moved:
                    failed[group] = f"moves {moved[0]} to other memory, which running kernels do not read"
                elif gone or other:
                    failed[group] = f"drops {gone[0]}" if gone else f"leaves other values in {other[0]}"
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
            self._memory = addresses
        return {
            group: f"vLLM's own loader cannot be used: run again with the checkpoint's own values, it {what}"
            for group, what in failed.items()
        }

    def _tensors(self, group: Rerunnable) -> Iterator[tuple[str, torch.Tensor]]:
        """The group's live tensors, and all that reloaded modules and their kernels keep beside what they share with
        the rest of the model."""
        for name in group.live:
            yield name, _find(self._model, name)
        if not group.modules:
            return
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        owners = self._owners
        known = set(group.live)

        def inside(name: str) -> bool:
            return name in group.live or any(name.startswith(f"{path}.") for path in group.modules)

        for path in group.modules:
            for below, module in self._model.get_submodule(path).named_modules(prefix=path):
                for leaf, tensor in held_by(module):
                    name = f"{below}.{leaf}"
                    nothing = tensor.is_meta or tensor.numel() == 0
                    if name in known or leaf in SKIP_LOAD_TENSORS or leaf in _HOST or nothing:
                        continue
                    if all(inside(owner) for owner in owners.get(tensor.untyped_storage().data_ptr(), ())):
                        known.add(name)
                        yield name, tensor

    @functools.cached_property
    def _owners(self) -> dict[int, list[str]]:
        """Memory -> the parameters and buffers of the model in it, before anything was loaded again."""
        found: dict[int, list[str]] = {}
        for path, module in self._model.named_modules():
            for leaf, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None and not tensor.is_meta:
                    found.setdefault(tensor.untyped_storage().data_ptr(), []).append(f"{path}.{leaf}")
        return found

    def _registered(self) -> _Registered:
        """Of all modules that loading may change."""
        paths = {name.rpartition(".")[0] for group in self.groups for name in group.live}
        modules = [self._model.get_submodule(path) for path in sorted(paths)]
        modules += [m for path in self._modules for m in self._model.get_submodule(path).modules()]
        return _registered(modules)

    @contextlib.contextmanager
    def _vllm(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(alone())
            if self._config is not None:
                from vllm.config import set_current_vllm_config

                stack.enter_context(set_current_vllm_config(self._config))
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
        had = self._registered()
        try:
            for root in roots:
                initialize_layerwise_reload(root)
            yield
            for root in roots:
                finalize_layerwise_reload(root, self._config.model_config)
        except BaseException:
            for root in roots:
                for module in root.modules():
                    get_layerwise_info(module).reset()
            _put_back(had)
            raise
        finally:
            # A loader left wrapped would ignore what it is given outside of a reload.
            for _, parameters, buffers, _ in had:
                for tensor in (*parameters.values(), *buffers.values()):
                    loader = getattr(tensor, "weight_loader", None)
                    while getattr(loader, "__name__", "") == "online_process_loader":
                        loader = loader.__wrapped__  # type: ignore[union-attr]
                        tensor.weight_loader = loader  # type: ignore[union-attr]


_Registered = list[
    tuple[
        nn.Module,
        dict[str, nn.Parameter | None],
        dict[str, torch.Tensor | None],
        list[tuple[dict[str, Any], dict[str, Any]]],
    ]
]


def _registered(modules: Iterable[nn.Module]) -> _Registered:
    """The modules, once each, with the tensors that they own, and the attributes of them and of their kernels."""
    every = {id(module): module for module in modules}
    return [
        (
            module,
            dict(module._parameters),
            dict(module._buffers),
            [(held, dict(held)) for held in (vars(module), *(vars(part) for _, part in _kernels(module)))],
        )
        for module in every.values()
    ]


def _put_back(had: _Registered) -> None:
    for module, parameters, buffers, attributes in had:
        for now, then in attributes:
            now.clear()
            now.update(then)
        module._parameters.clear()
        module._parameters.update(parameters)
        module._buffers.clear()
        module._buffers.update(buffers)


@contextlib.contextmanager
def kept_as_is(model: nn.Module) -> Iterator[None]:
    """Puts back which tensors and attributes the modules of a model have, whatever is done to them meanwhile."""
    had = _registered(model.modules())
    try:
        yield
    finally:
        _put_back(had)


_HOST = ("_k_scale_cpu", "_v_scale_cpu")
"""What attention layers keep for the host beside the scales of their KV cache, made anew each time: no kernel reads
that memory later."""
_DEPTH = 4
"""How far below a module's kernel tensors are looked for."""


def held_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a module keeps itself, under their names: parameters, buffers, attributes, and what its kernels
    keep. Submodules are left out."""
    own = {**vars(module), **module._parameters, **module._buffers}
    yield from ((leaf, tensor) for leaf, tensor in own.items() if isinstance(tensor, torch.Tensor))
    seen: set[int] = set()
    for name, kernel in _kernels(module):
        yield from _inside(kernel, name, seen, _DEPTH)


def _kernels(module: nn.Module) -> list[tuple[str, Any]]:
    """What computes for a module and is no part of the tree of modules."""
    found = [(name, getattr(module, name, None)) for name in ("impl", "quant_method")]
    return [
        (name, part)
        for name, part in found
        if isinstance(getattr(part, "__dict__", None), dict) and not isinstance(part, nn.Module)
    ]


def _inside(value: Any, name: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (nn.Module, type)):
        return
    seen.add(id(value))
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    elif type(value).__module__.partition(".")[0] not in ("torch", "builtins"):
        parts = getattr(value, "__dict__", {}).items()
    for leaf, part in list(parts):
        yield from _inside(part, f"{name}.{leaf}", seen, depth - 1)


_COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "reduce_scatter_tensor",
)  # fmt: skip


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While a loader runs, nothing may wait for the server's other workers: one of them may have failed before it got
    there, and the rest would wait for ever. (Online quantisation agrees on scales where it cuts a layer.)"""
    import torch.distributed as dist
    from vllm.distributed.parallel_state import GroupCoordinator

    here = threading.get_ident()
    others = not dist.is_initialized() or dist.get_world_size() > 1

    def guarded(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if others and threading.get_ident() == here:
                raise RuntimeError(
                    f"it calls {name}, and a worker that waits for the server's others may wait for ever"
                )
            return collective(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for where, name in itertools.product((dist, GroupCoordinator), _COLLECTIVES):
            if (collective := getattr(where, name, None)) is not None:
                stack.enter_context(mock.patch.object(where, name, guarded(name, collective)))
        yield


def _find(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), leaf, None)
    if not isinstance(tensor, torch.Tensor):
        raise LoaderError(f"vLLM's loader removed {name}")
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, wherever they are."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def _spoil(tensor: torch.Tensor, right: torch.Tensor) -> None:
    """Every element becomes another one than in `right`, also where two tensors share memory."""
    wrong = right.to(tensor.device).contiguous().reshape(-1).view(torch.uint8).bitwise_not()
    tensor.detach().copy_(wrong.view(tensor.dtype).reshape(tensor.shape))
