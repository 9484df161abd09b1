"""What all ranks hold together, from what each says that it holds (`sources.Held.describe`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ..layout.shards import LayoutError, check_source
from ..layout.tensors import Mesh, Placement, Replicate, SourceParameter, Within
from .handle import PublishError
from .precision import Cast, rounded
from .sources import read_placement


def pack(entries: Sequence[dict[str, Any]]) -> bytes:
    """What `Held.describe` says of all tensors of a rank, with each mesh once: it may have thousands of ranks."""
    meshes: dict[int, int] = {}
    table: list[Any] = []
    rows = []
    for entry in entries:
        mesh = entry["mesh"]
        if mesh is not None:
            if id(mesh) not in meshes:
                meshes[id(mesh)] = len(table)
                table.append(mesh)
            entry = {**entry, "mesh": meshes[id(mesh)]}
        rows.append(entry)
    return json.dumps({"meshes": table, "entries": rows}, separators=(",", ":")).encode()


def unpack(data: bytes) -> list[dict[str, Any]]:
    said = json.loads(data)
    for entry in said["entries"]:
        if entry["mesh"] is not None:
            entry["mesh"] = said["meshes"][entry["mesh"]]
    return list(said["entries"])


def merge(said: Sequence[Sequence[dict[str, Any]]]) -> tuple[SourceParameter, ...]:
    """One list of sources from what each rank says it holds (`Held.describe`), equal on all ranks.

    A plain tensor is replicated on the ranks that hold it; a DTensor must be held by the ranks of its mesh.
    Ranks that say the same may share one list object, which is then looked at once.
    Raises `PublishError` naming parameter and ranks.
    """
    alike: dict[int, list[int]] = {}
    for rank, entries in enumerate(said):
        alike.setdefault(id(entries), []).append(rank)
    holders: dict[str, list[int]] = {}
    layout: dict[str, tuple[int, dict[str, Any]]] = {}
    for ranks in alike.values():
        rank = ranks[0]
        for entry in said[rank]:
            name = entry["name"]
            first = layout.setdefault(name, (rank, entry))
            if first[0] == rank:
                holders[name] = ranks
                continue
            holders[name] = holders[name] + ranks
            for what in ("shape", "dtype", "mesh", "placements", "parts"):
                if first[1].get(what) != entry.get(what):
                    raise PublishError(_differ(name, what, first, (rank, entry)))
            if first[1].get("fingerprint") != entry.get("fingerprint"):
                raise PublishError(
                    f"parameter {name!r} is a plain tensor with other values on rank {first[0]} than on rank "
                    f"{rank}: make it a DTensor, or give each rank's part a name of its own"
                )
    if not layout:
        raise PublishError("there are no parameters to publish")
    wide = rounded(
        Cast(name, math.prod(e["shape"]), e["computed"], e["dtype"], e["kept"])
        for name, (_, e) in layout.items()
    )
    meshes: dict[Any, Mesh] = {}
    right: set[tuple[Mesh, tuple[Placement, ...], int]] = set()
    sources: list[SourceParameter] = []
    tensor_of: dict[str, str] = {}
    for name, (_, entry) in layout.items():
        mesh, placements = _placed(name, entry, sorted(holders[name]), meshes)
        shape, parts = tuple(entry["shape"]), entry.get("parts")
        regions: list[Any] = parts if parts is not None else [[name, None, shape]]
        for part, at, extent in regions:
            if (other := tensor_of.setdefault(part, name)) != name:
                raise PublishError(
                    f"two different tensors are named {part!r}, {other!r} on rank {layout[other][0]} and "
                    f"{name!r} on rank {layout[name][0]}: check `names`"
                )
            within = None if at is None else Within(name, shape, tuple(at))
            sources.append(
                SourceParameter(
                    part, tuple(extent), entry["dtype"], mesh, placements, within, wide.get(name, "")
                )
            )
        if (mesh, placements, len(shape)) not in right:
            _check_layout(name, sources[-1])
            right.add((mesh, placements, len(shape)))
    return tuple(sources)


def _check_layout(name: str, source: SourceParameter) -> None:
    try:
        check_source(source)
    except LayoutError as e:
        raise PublishError(
            f"tensor {name!r}: {e}. Its shards are not what Shard, Replicate, or FSDP over tensor parallelism "
            "make of a whole tensor (as of a packed one, cut part by part): publish its parts as DTensors of their own"
        ) from None


def _differ(name: str, what: str, first: tuple[int, Any], other: tuple[int, Any]) -> str:
    mine, theirs = first[1].get(what), other[1].get(what)
    if what == "parts":
        if mine is not None and theirs is not None and mine[0][0] != theirs[0][0]:
            held = f"holds {mine[0][0]!r} on rank {first[0]} and {theirs[0][0]!r} on rank {other[0]}"
        else:
            held = f"is cut into other checkpoint parameters on rank {first[0]} than on rank {other[0]}"
        return f"tensor {name!r} {held}: `names` must answer alike on all ranks"
    return f"parameter {name!r}: {what} is {mine} on rank {first[0]} and {theirs} on rank {other[0]}"


def _placed(
    name: str, entry: dict[str, Any], ranks: list[int], meshes: dict[Any, Mesh]
) -> tuple[Mesh, tuple[Placement, ...]]:
    """The mesh of a tensor, one object for all tensors on it, and its placements."""
    said = entry["mesh"]
    # The entries outlive this call, so that their ids mean what they meant.
    key = (None if said is None else id(said), tuple(ranks))
    if key not in meshes:
        if said is None:
            mesh = Mesh((len(ranks),), tuple(ranks))
        else:
            mesh = Mesh(tuple(said["shape"]), tuple(said["ranks"]))
            if sorted(mesh.ranks) != ranks:
                raise PublishError(
                    f"parameter {name!r}: its mesh has ranks {sorted(mesh.ranks)}, but it is held by {ranks}"
                )
        meshes[key] = meshes.setdefault(mesh, mesh)
    if said is None:
        return meshes[key], (Replicate(),)
    return meshes[key], tuple(read_placement(p) for p in entry["placements"])
