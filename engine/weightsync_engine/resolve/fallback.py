"""Pure: which checkpoint parameters go to vLLM's own loader instead, as whole tensors.

A parameter that cannot be written directly may still be loaded, as vLLM loaded it at its start, if everything
about it is known: its name and whole shape in the checkpoint, and that vLLM's loader may be run again for the
live tensors that it fills. No live tensor is ever half direct: with one parameter go all that share a live
tensor with it, and with one tensor of a module that is reloaded all tensors of that module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from ..layout.tensors import DTYPE_BYTES
from .names import CheckpointNames
from .placement import LiveTensor, Placement, Whole
from .shards import Rerun


@dataclass(frozen=True)
class Rerunnable:
    """Checkpoint parameters and live tensors that belong together: all go to the loader, or none."""

    names: tuple[str, ...]
    live: tuple[str, ...]
    """Under each of their names."""
    modules: tuple[str, ...]
    """That go through layerwise reload."""
    refused: tuple[tuple[str, str], ...]
    """What was unresolved: the reasons, should it fail after all."""


class _Unknown(Exception):
    """Why the loader cannot be used."""


def fall_back(
    placement: Placement,
    live: Iterable[LiveTensor],
    names: CheckpointNames,
    shapes: Mapping[str, tuple[int, ...]] | None,
    dtypes: Mapping[str, str],
) -> tuple[Placement, tuple[Rerunnable, ...]]:
    """Move what vLLM's loader can do from `unresolved` to `fallback`.

    Args:
        placement: what is direct, and what is not.
        live: the tensors that were placed.
        names: as they were placed.
        shapes: whole shapes by checkpoint name; None: nothing can go to the loader.
        dtypes: by checkpoint name, where they are known; else a parameter travels in its live tensor's dtype.
    """
    if not placement.unresolved or shapes is None:
        return placement, ()
    index = _Index(placement, live, names)
    found: list[Rerunnable] = []
    unresolved, expected, reasons = dict(placement.unresolved), dict(placement.expected), dict[str, str]()
    done: set[Hashable] = set()
    for storage in index.bad:
        if storage in done:
            continue
        try:
            group = _Group(index, storage)
            for name in sorted(group.names):
                if name not in shapes:
                    raise _Unknown(f"the checkpoint has no {name}")
                if dtypes.get(name, "float32") not in DTYPE_BYTES:
                    raise _Unknown(f"{name} is of type {dtypes[name]} in the checkpoint, which cannot travel")
        except _Unknown as why:
            done.add(storage)
            if str(why):
                told = f"; vLLM's loader cannot be used: {why}"
                unresolved |= {n: unresolved[n] + told for n in index.blamed(storage) if n in unresolved}
            continue
        done |= group.storages.keys()
        tensors = [t for s in group.storages for t in index.tensors[s]]
        refused = {n: unresolved.pop(n) for s in group.storages for n in index.blamed(s) if n in unresolved}
        first = next(iter(refused.values()))
        for name in sorted(group.names):
            held = next((t for t in tensors if name in placement.holds.get(t.name, ())), tensors[0])
            dtype = dtypes.get(name, held.dtype)
            expected[name] = Whole(shapes[name], dtype)
            own = refused.get(name) or next((refused[t.name] for t in tensors if t.name in refused), None)
            reasons[name] = own or f"it shares a live tensor with what is loaded by vLLM: {first}"
        found.append(
            Rerunnable(
                tuple(sorted(group.names)),
                tuple(sorted(t.name for t in tensors)),
                tuple(sorted(group.modules)),
                tuple(refused.items()),
            )
        )
    gone = {name for one in found for name in one.live}
    fallback = placement.fallback | reasons
    return dataclasses.replace(
        placement,
        expected=expected,
        placed=tuple(p for p in placement.placed if p.name not in fallback),
        unresolved=unresolved,
        must_compare=placement.must_compare - fallback.keys(),
        shared=placement.shared - gone,
        fallback=fallback,
    ), tuple(found)


def give_up(placement: Placement, group: Rerunnable, why: str) -> Placement:
    """Put one group back among what is unresolved."""
    return dataclasses.replace(
        placement,
        expected={n: e for n, e in placement.expected.items() if n not in group.names},
        fallback={n: r for n, r in placement.fallback.items() if n not in group.names},
        unresolved=placement.unresolved | {n: f"{r}; {why}" for n, r in group.refused},
    )


class _Index:
    """Live tensors by memory, by name and by what they hold."""

    def __init__(self, placement: Placement, live: Iterable[LiveTensor], names: CheckpointNames) -> None:
        self.placement, self.names = placement, names
        self.tensors: dict[Hashable, list[LiveTensor]] = {}
        self.holders: dict[str, list[Hashable]] = {}
        self.modules: dict[str, list[Hashable]] = {}
        self.copies: dict[Hashable, list[Hashable]] = {}
        for tensor in live:
            used = tensor.name in placement.holds or tensor.name in placement.unresolved
            if tensor.optional and not used:
                continue
            self.tensors.setdefault(tensor.storage, []).append(tensor)
            self.modules.setdefault(tensor.name.rpartition(".")[0], []).append(tensor.storage)
            for name in placement.holds.get(tensor.name, ()):
                self.holders.setdefault(name, []).append(tensor.storage)
            if tensor.source is not None:
                self.copies.setdefault(tensor.source, []).append(tensor.storage)
        self.bad = [s for s in self.tensors if self.blamed(s)]
        taken = {n for s in self.tensors for n in self.held(s)} | placement.aliases.keys()
        self._taken = taken | placement.expected.keys()

    def held(self, storage: Hashable) -> set[str]:
        return {n for t in self.tensors[storage] for n in self.placement.holds.get(t.name, ())}

    def blamed(self, storage: Hashable) -> list[str]:
        """The names under which something of it is unresolved."""
        own = [t.name for t in self.tensors[storage]]
        return [
            n for n in dict.fromkeys((*own, *sorted(self.held(storage)))) if n in self.placement.unresolved
        ]

    def reruns(self, storage: Hashable) -> dict[str, Rerun | None]:
        """By the names under which something of it is unresolved."""
        return {name: self.placement.reruns.get(name) for name in self.blamed(storage)}

    def feeding(self, storage: Hashable) -> tuple[list[str], list[Hashable]]:
        """What the checkpoint has for a tensor that nothing names: all that no other tensor claims, below the
        nearest module that has any, if nothing there is written directly. Also the tensors there that it may
        feed. Raises `_Unknown`."""
        tensor = self.tensors[storage][0]
        path = tensor.name.rpartition(".")[0]
        while path:
            inside = [
                s for p, ss in self.modules.items() if p == path or p.startswith(path + ".") for s in ss
            ]
            if not all(self.blamed(s) for s in inside):
                break
            free = [n for n in self.names.under(path) if n not in self._taken]
            if free:
                return free, [s for s in inside if not self.held(s)]
            path = path.rpartition(".")[0]
        raise _Unknown(f"it cannot be told which parameters of the checkpoint fill {tensor.name}")


class _Group:
    """Everything that must go to the loader with one live tensor. Raises `_Unknown` where something must not."""

    def __init__(self, index: _Index, storage: Hashable) -> None:
        self.storages: dict[Hashable, None] = {}
        self.names: set[str] = set()
        self.modules: set[str] = set()
        self._index = index
        asked: set[Hashable] = set()
        todo = [storage]
        while todo:
            while todo:
                one = todo.pop()
                if one not in self.storages:
                    self.storages[one] = None
                    todo += self._with(one)
            for one in self.storages:
                todo += [s for s in self._beside(one) if s not in self.storages]
            if todo:
                continue
            unnamed = [s for s in self.storages if s not in asked and not index.held(s) and not self._made(s)]
            for one in unnamed[:1]:
                names, todo = index.feeding(one)
                self.names |= set(names)
                asked |= {one, *todo}

    def _with(self, storage: Hashable) -> list[Hashable]:
        """Tensors that hold the same parameters, or are computed from it or it from them."""
        index = self._index
        for name, rerun in index.reruns(storage).items():
            if rerun is None:
                raise _Unknown("" if len(self.storages) == 1 else f"it would have to load {name} as well")
            self.modules |= set(rerun.modules)
        self.names |= index.held(storage)
        sources = [t.source for t in index.tensors[storage] if t.source in index.tensors]
        same = [s for n in index.held(storage) for s in index.holders[n]]
        return [*same, *index.copies.get(storage, ()), *sources]

    def _beside(self, storage: Hashable) -> list[Hashable]:
        """Tensors of the same module, if it is reloaded: it comes back with nothing but what was loaded."""
        paths = {n.rpartition(".")[0] for t in self._index.tensors[storage] for n in (t.name, *t.also)}
        reloaded = {p for p in paths for m in self.modules if p == m or p.startswith(m + ".")}
        owners = {t.name.rpartition(".")[0] for t in self._index.tensors[storage]} if reloaded else set()
        return [s for path in owners for s in self._index.modules[path]]

    def _made(self, storage: Hashable) -> bool:
        """By vLLM, from what is loaded: a copy, or what the processing of a module adds to it (a scale)."""
        copied = any(t.source is not None for t in self._index.tensors[storage])
        return copied or any(self._index.held(s) for s in self._beside(storage))
