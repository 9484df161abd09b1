"""Manifests and sources as bytes: canonical JSON, checked when read. Equal values give equal bytes.

What many parameters have alike is written once and referred to by its place in a table: names (sorted, each
without the beginning that it shares with the one before), tuples of numbers, layouts (a mesh may have thousands of
ranks), the trainer's tensors. Columns hold the rest: one number for each parameter or piece.
"""

from __future__ import annotations

import hashlib
import json
import os.path
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from .boxes import Box
from .tensors import (
    Expected,
    Mesh,
    Piece,
    Placement,
    Replicate,
    Shard,
    SlabTensor,
    SourceParameter,
    StridedShard,
    TrainerManifest,
    Within,
    WorkerManifest,
)

Number = Annotated[int, Field(ge=0, strict=True)]
Column = list[Number]
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Names(_Read):
    kept: Column
    """How many characters of the name before come first."""
    rest: list[str]


class _Sources(_Read):
    names: _Names
    tuples: list[Column]
    layouts: list[tuple[Number, Number, list[Column]]]
    """(mesh's shape, mesh's ranks, placements: [] replicated, [dim] cut, [dim, split factor] cut in strides)"""
    kinds: list[tuple[Number, Number, Number]]
    """(shape, dtype, layout)"""
    tensors: list[tuple[Number, Number]]
    """(name, shape) of the trainer's tensors that parameters are regions of."""
    name: Column
    kind: Column
    tensor: Column
    """One more than the place in `tensors`; 0: none."""
    at: Column
    rounded: list[tuple[Number, Number]]
    """(which parameter, dtype that it is rounded from), of the few that are."""


class _Slab(_Read):
    name: Column
    offset: Column
    shape: Column
    dtype: Column


class _Trainer(_Read):
    rank: Number
    sources: _Sources
    names: _Names
    tuples: list[Column]
    slab: _Slab


class _Expected(_Read):
    name: Column
    shape: Column
    dtype: Column


class _Pieces(_Read):
    name: Column
    start: Column
    shape: Column
    tensor: Column
    at: Column


class _Worker(_Read):
    names: _Names
    tuples: list[Column]
    expected: _Expected
    pieces: _Pieces
    slab: _Slab
    unresolved: dict[str, str]
    aliases: dict[str, str]
    fallback: dict[str, str]
    unused: list[str]
    draft: list[str]


def encode_trainer(manifest: TrainerManifest) -> bytes:
    """Sources in the order that they have."""
    names, tuples = _names_of(manifest.tensors), _shapes_of(manifest.tensors)
    return _canonical(
        {
            "rank": manifest.trainer_rank,
            "sources": _sources(manifest.sources),
            "names": names.written(),
            "tuples": tuples.values,
            "slab": _slab(manifest.tensors, names, tuples),
        }
    )


def decode_trainer(data: bytes) -> TrainerManifest:
    """Raises ValueError for anything else than an encoded manifest."""
    read = _Trainer.model_validate_json(data)
    names, tuples = _strings(read.names), [tuple(t) for t in read.tuples]
    return TrainerManifest(read.rank, _read_sources(read.sources), _read_slab(read.slab, names, tuples))


def encode_sources(sources: Sequence[SourceParameter]) -> bytes:
    """Sources in order of name: their order carries no meaning."""
    return _canonical(_sources(sorted(sources, key=lambda s: s.name)))


def decode_sources(data: bytes) -> tuple[SourceParameter, ...]:
    """Equal meshes, placements and shapes are one object each. Raises ValueError for anything else than encoded
    sources, and for a name that is there twice."""
    sources = _read_sources(_Sources.model_validate_json(data))
    for one, other in pairwise(sources):
        if one.name >= other.name:
            raise ValueError(f"sources: {other.name!r} comes after {one.name!r}: twice, or out of order")
    return sources


def encode_worker(manifest: WorkerManifest) -> bytes:
    """Pieces are put in order of name and box: their order carries no meaning."""
    pieces = sorted(manifest.pieces, key=lambda p: (p.name, p.box.start, p.box.shape, p.tensor, p.at))
    expected = sorted(manifest.expected.items())
    names = _names_of(
        manifest.tensors,
        manifest.expected,
        (whole.dtype for whole in manifest.expected.values()),
        (name for p in pieces for name in (p.name, p.tensor)),
    )
    tuples = _shapes_of(
        manifest.tensors,
        (whole.shape for whole in manifest.expected.values()),
        (value for p in pieces for value in (p.box.start, p.box.shape, p.at)),
    )
    return _canonical(
        {
            "names": names.written(),
            "tuples": tuples.values,
            "expected": {
                "name": [names.at[name] for name, _ in expected],
                "shape": [tuples.at[whole.shape] for _, whole in expected],
                "dtype": [names.at[whole.dtype] for _, whole in expected],
            },
            "pieces": {
                "name": [names.at[p.name] for p in pieces],
                "start": [tuples.at[p.box.start] for p in pieces],
                "shape": [tuples.at[p.box.shape] for p in pieces],
                "tensor": [names.at[p.tensor] for p in pieces],
                "at": [tuples.at[p.at] for p in pieces],
            },
            "slab": _slab(manifest.tensors, names, tuples),
            "unresolved": manifest.unresolved,
            "aliases": manifest.aliases,
            "fallback": manifest.fallback,
            "unused": sorted(manifest.unused),
            "draft": sorted(manifest.draft),
        }
    )


def decode_worker(data: bytes) -> WorkerManifest:
    """Raises ValueError for anything else than an encoded manifest."""
    read = _Worker.model_validate_json(data)
    names, tuples = _strings(read.names), [tuple(t) for t in read.tuples]
    e, p = read.expected, read.pieces
    expected = zip(
        _looked_up("expected.name", e.name, names),
        _looked_up("expected.shape", e.shape, tuples),
        _looked_up("expected.dtype", e.dtype, names),
        strict=True,
    )
    pieces = zip(
        _looked_up("pieces.name", p.name, names),
        _looked_up("pieces.start", p.start, tuples),
        _looked_up("pieces.shape", p.shape, tuples),
        _looked_up("pieces.tensor", p.tensor, names),
        _looked_up("pieces.at", p.at, tuples),
        strict=True,
    )
    return WorkerManifest(
        expected={name: Expected(shape, dtype) for name, shape, dtype in expected},
        pieces=tuple(Piece(name, Box(start, shape), tensor, at) for name, start, shape, tensor, at in pieces),
        tensors=_read_slab(read.slab, names, tuples),
        unresolved=read.unresolved,
        aliases=read.aliases,
        fallback=read.fallback,
        unused=frozenset(read.unused),
        draft=frozenset(read.draft),
    )


def digest_of(data: bytes) -> str:
    """blake2b, 128 bits, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# ---- writing -----------------------------------------------------------------------------------------------


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


class _Table:
    """Values, each once, in order, and where each one is."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = sorted(set(values))
        self.at = {value: i for i, value in enumerate(self.values)}

    def written(self) -> dict[str, list[Any]]:
        """Names, each without the beginning that it shares with the one before."""
        kept, rest, before = [], [], ""
        for name in self.values:
            same = len(os.path.commonprefix((before, name)))
            kept.append(same)
            rest.append(name[same:])
            before = name
        return {"kept": kept, "rest": rest}


def _names_of(slab: dict[str, SlabTensor], *others: Iterable[str]) -> _Table:
    return _Table({*slab, *(t.dtype for t in slab.values()), *(n for other in others for n in other)})


def _shapes_of(slab: dict[str, SlabTensor], *others: Iterable[tuple[int, ...]]) -> _Table:
    return _Table({*(t.shape for t in slab.values()), *(n for other in others for n in other)})


def _slab(tensors: dict[str, SlabTensor], names: _Table, tuples: _Table) -> dict[str, list[int]]:
    places = sorted(tensors.items())
    return {
        "name": [names.at[name] for name, _ in places],
        "offset": [t.offset for _, t in places],
        "shape": [tuples.at[t.shape] for _, t in places],
        "dtype": [names.at[t.dtype] for _, t in places],
    }


class _InOrder(dict[H, int]):
    """Where each value stands, in the order in which they are asked for."""

    def __missing__(self, value: H) -> int:
        self[value] = len(self)
        return len(self) - 1


def _sources(sources: Sequence[SourceParameter]) -> dict[str, Any]:
    names = _Table(n for s in sources for n in (s.name, s.dtype, s.tensor, s.rounded_from or s.dtype))
    tuples = _Table(
        t
        for s in sources
        for t in (s.shape, s.mesh.shape, s.mesh.ranks, *((s.within.shape, s.within.at) if s.within else ()))
    )
    layouts: _InOrder[tuple[Mesh, tuple[Placement, ...]]] = _InOrder()
    kinds: _InOrder[tuple[int, int, int]] = _InOrder()
    tensors: _InOrder[tuple[str, tuple[int, ...]]] = _InOrder()
    kind, tensor, at = [], [], []
    for s in sources:
        kind.append(kinds[tuples.at[s.shape], names.at[s.dtype], layouts[s.mesh, s.placements]])
        tensor.append(0 if s.within is None else 1 + tensors[s.within.tensor, s.within.shape])
        at.append(0 if s.within is None else tuples.at[s.within.at])
    return {
        "names": names.written(),
        "tuples": tuples.values,
        "layouts": [
            [tuples.at[mesh.shape], tuples.at[mesh.ranks], [_placement(p) for p in placements]]
            for mesh, placements in layouts
        ],
        "kinds": list(kinds),
        "tensors": [[names.at[name], tuples.at[shape]] for name, shape in tensors],
        "name": [names.at[s.name] for s in sources],
        "kind": kind,
        "tensor": tensor,
        "at": at,
        "rounded": [[i, names.at[s.rounded_from]] for i, s in enumerate(sources) if s.rounded_from],
    }


def _placement(placement: Placement) -> list[int]:
    if isinstance(placement, Replicate):
        return []
    return [placement.dim] if isinstance(placement, Shard) else [placement.dim, placement.split_factor]


# ---- reading -----------------------------------------------------------------------------------------------


def _strings(read: _Names) -> list[str]:
    if len(read.kept) != len(read.rest):
        raise ValueError(f"names: {len(read.kept)} beginnings for {len(read.rest)} ends")
    names, before = [], ""
    for kept, rest in zip(read.kept, read.rest, strict=True):
        if kept > len(before):
            raise ValueError(f"names: {kept} characters of {before!r} are to be kept")
        before = before[:kept] + rest
        names.append(before)
    return names


def _looked_up(what: str, column: Column, table: Sequence[T]) -> list[T]:
    try:
        return [table[i] for i in column]
    except IndexError:
        raise ValueError(f"{what}: refers to place {max(column)} in a table of {len(table)}") from None


def _same_length(what: str, *columns: Column) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{what}: columns of unlike lengths {[len(column) for column in columns]}")


def _read_slab(read: _Slab, names: Sequence[str], tuples: Sequence[tuple[int, ...]]) -> dict[str, SlabTensor]:
    _same_length("slab", read.name, read.offset, read.shape, read.dtype)
    rows = zip(
        _looked_up("slab.name", read.name, names),
        read.offset,
        _looked_up("slab.shape", read.shape, tuples),
        _looked_up("slab.dtype", read.dtype, names),
        strict=True,
    )
    return {name: SlabTensor(offset, shape, dtype) for name, offset, shape, dtype in rows}


def _read_placement(said: Column) -> Placement:
    if len(said) > 2:
        raise ValueError(
            f"a placement of {len(said)} numbers: expected none, a dimension, or one and a factor"
        )
    make: Sequence[Callable[..., Placement]] = (Replicate, Shard, StridedShard)
    return make[len(said)](*said)


def _read_sources(read: _Sources) -> tuple[SourceParameter, ...]:
    _same_length("sources", read.name, read.kind, read.tensor, read.at)
    names, tuples = _strings(read.names), [tuple(t) for t in read.tuples]

    meshes: dict[tuple[int, int], Mesh] = {}
    layouts: list[tuple[Mesh, tuple[Placement, ...]]] = []
    for shape, ranks, placements in read.layouts:
        if (shape, ranks) not in meshes:
            meshes[shape, ranks] = Mesh(*_looked_up("layouts", [shape, ranks], tuples))
        layouts.append((meshes[shape, ranks], tuple(_read_placement(p) for p in placements)))
    kinds = list(
        zip(
            _looked_up("kinds", [shape for shape, _, _ in read.kinds], tuples),
            _looked_up("kinds", [dtype for _, dtype, _ in read.kinds], names),
            _looked_up("kinds", [layout for _, _, layout in read.kinds], layouts),
            strict=True,
        )
    )
    tensors: list[tuple[str, tuple[int, ...]] | None] = [None]
    tensors += zip(
        _looked_up("tensors", [name for name, _ in read.tensors], names),
        _looked_up("tensors", [shape for _, shape in read.tensors], tuples),
        strict=True,
    )
    at_of: list[tuple[int, ...]] = [()] * len(read.at)
    if read.tensors:
        at_of = _looked_up("at", read.at, tuples)
    rows = zip(
        _looked_up("name", read.name, names),
        _looked_up("kind", read.kind, kinds),
        _looked_up("tensor", read.tensor, tensors),
        at_of,
        strict=True,
    )
    found = [
        SourceParameter(name, shape, dtype, *layout, None if tensor is None else Within(*tensor, at))
        for name, (shape, dtype, layout), tensor, at in rows
    ]
    wide = _looked_up("rounded", [dtype for _, dtype in read.rounded], names)
    for (place, _), dtype in zip(read.rounded, wide, strict=True):
        (one,) = _looked_up("rounded", [place], found)
        found[place] = replace(one, rounded_from=dtype)
    return tuple(found)
