"""Pure: a plan as a person reads it, and as a program does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..layout.shards import shard_boxes
from ..layout.tensors import DTYPE_BYTES, SourceParameter
from ..plan.cost import RankCost, links, rank_costs
from ..plan.plan import Plan
from ..plan.validate import IN_FLIGHT
from ..protocol.messages import rounded_words, rounding


@dataclass(frozen=True)
class Server:
    """What is known of the servers of one kind."""

    title: str
    count: int
    workers: int
    live_bytes: tuple[int, ...]
    """By worker: its shadow, which repeats its part of the model and has what goes to vLLM's loader whole."""


def report(
    plan: Plan,
    sources: Sequence[SourceParameter],
    trainer: str,
    servers: Sequence[Server],
    refused: Mapping[str, str],
    refused_bytes: int,
) -> dict[str, Any]:
    """Everything worth knowing, as plain values (bytes, counts). `refused`: parameters that the servers cannot take
    at all, with the reasons; they are not in the plan."""
    costs = rank_costs(plan)
    snapshot = _snapshots(sources, plan.trainer_ranks)
    shadow = [b for s in servers for b in s.live_bytes * s.count]
    senders, receivers = costs[: plan.trainer_ranks], costs[plan.trainer_ranks :]
    used = [s for s in sources if s.name not in plan.unused]
    travelling = {s.name: math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in used}
    loaded = sum(n for name, n in travelling.items() if name in plan.fallback)
    total = sum(travelling.values()) + refused_bytes
    between = links(plan)
    return {
        "trainer": {"mesh": trainer, "ranks": plan.trainer_ranks},
        "servers": [{"title": s.title, "count": s.count, "workers": s.workers} for s in servers],
        "parameters": {
            "all": len(sources) + len(refused),
            "direct": len(sources) - len(plan.fallback) - len(plan.unused),
            "by_loader": plan.fallback,
            "unused": sorted(plan.unused),
            "refused": dict(sorted(refused.items())),
            "tied": dict(sorted(plan.tied.items())),
            "draft": sorted(plan.draft),
            "rounded": plan.rounded,
        },
        "bytes": {
            "model": total,
            "direct_share": (total - loaded - refused_bytes) / total if total else 0.0,
            "loader_share": loaded / total if total else 0.0,
            "received_by_all": plan.bytes_received,
        },
        "steps": len(plan.steps),
        "digest": plan.digest,
        "links": _spread(list(between.values())),
        "trainer_ranks": _side(senders, "bytes_sent") | {"snapshot_bytes": _spread(snapshot)},
        "workers": _side(receivers, "bytes_received") | {"shadow_bytes": _spread(shadow)},
        "by_rank": [asdict(cost) for cost in costs],
    }


def _snapshots(sources: Sequence[SourceParameter], ranks: int) -> list[int]:
    held = [0] * ranks
    seen: set[str] = set()
    known: dict[object, list[tuple[int, int]]] = {}
    for source in sources:
        if source.tensor in seen:
            continue
        seen.add(source.tensor)
        key = (id(source.mesh), source.placements, source.tensor_shape)
        if key not in known:
            known[key] = [(rank, box.size) for rank, box in shard_boxes(source).items() if box is not None]
        for rank, elements in known[key]:
            held[rank] += elements * DTYPE_BYTES[source.dtype]
    return held


def _spread(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {"count": 0, "least": 0, "mean": 0, "most": 0}
    return {"count": len(values), "least": min(values), "mean": statistics.fmean(values), "most": max(values)}


def _side(costs: Sequence[RankCost], what: str) -> dict[str, Any]:
    return {
        what: _spread([getattr(c, what) for c in costs]),
        "steps": _spread([c.steps for c in costs]),
        "staging_bytes": _spread([IN_FLIGHT * c.staging_bytes for c in costs]),
    }


def text(found: Mapping[str, Any], reasons: int = 8) -> str:
    """The report as a table."""
    p, b = found["parameters"], found["bytes"]
    servers = ", ".join(
        f"{s['count']} x {s['title']} ({s['workers']} worker{'s' if s['workers'] > 1 else ''})"
        for s in found["servers"]
    )
    words = [rounded_words(name, *dtypes) for name, dtypes in p["rounded"].items()]
    lines = [
        f"trainer     {found['trainer']['mesh']}: {found['trainer']['ranks']} ranks",
        f"servers     {servers}",
        f"parameters  {p['all']}: {p['direct']} direct ({b['direct_share']:.1%} of {size(b['model'])})"
        + (f", {len(p['by_loader'])} by vLLM's loader ({b['loader_share']:.1%})" if p["by_loader"] else "")
        + (f", {len(p['refused'])} refused" if p["refused"] else "")
        + (f", {len(p['tied'])} tied" if p["tied"] else "")
        + (f", {len(p['draft'])} for draft models alone" if p["draft"] else "")
        + (f", {len(p['unused'])} not sent: vLLM has no use for them" if p["unused"] else ""),
        *(["rounding    " + rounding(len(p["rounded"]), words)] if p["rounded"] else []),
        f"plan        {found['steps']} steps, {size(b['received_by_all'])} received by all workers together, "
        f"digest {found['digest']}",
        "",
        f"{'':28}{'least':>12}{'mean':>12}{'most':>12}",
    ]

    def row(title: str, values: Mapping[str, float], unit: bool = True) -> None:
        told = [size(values[k]) if unit else f"{values[k]:.0f}" for k in ("least", "mean", "most")]
        lines.append(f"{title:28}" + "".join(f"{t:>12}" for t in told))

    t, w = found["trainer_ranks"], found["workers"]
    row("a trainer rank sends", t["bytes_sent"])
    row("  in steps", t["steps"], False)
    row("  snapshot", t["snapshot_bytes"])
    row("  staging", t["staging_bytes"])
    row("a worker receives", w["bytes_received"])
    row("  in steps", w["steps"], False)
    row("  shadow", w["shadow_bytes"])
    row("  staging", w["staging_bytes"])
    row(f"a link carries ({found['links']['count']:.0f})", found["links"])
    for title, told in (
        ("by vLLM's loader, whole to every worker that holds a part", p["by_loader"]),
        ("refused", p["refused"]),
    ):
        if not told:
            continue
        lines += ["", f"{title}: {len(told)} parameters"]
        by_reason: dict[str, list[str]] = {}
        for name, reason in told.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in list(by_reason.items())[:reasons]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {names[0]}{more}: {reason}")
        if len(by_reason) > reasons:
            lines.append(f"  and {len(by_reason) - reasons} more reasons (--json has all)")
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes in decimal units, as links and memory are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:.0f} TB"
