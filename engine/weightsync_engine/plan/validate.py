"""The envelope of `nccl.m2n`: what a step must satisfy, checked apart from the compiler that makes it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from ..layout.tensors import DTYPE_BYTES, Shard
from .steps import Side, Step, exchanges


@dataclass(frozen=True, slots=True)
class Envelope:
    """Limits of one version of the library; others are another value, not other code."""

    max_dims: int = 3
    max_sources: int = 16
    """Source ranks that one target may hear."""
    max_targets: int = 64
    """Target ranks that one source may serve."""
    max_local_bytes: int = 2 << 30


M2N = Envelope()
"""nccl-extensions 0.1.0."""


def violations(step: Step, envelope: Envelope = M2N) -> list[str]:
    """What the step does that the library refuses, or hangs on; empty when it is inside."""
    found: list[str] = []
    if step.dtype not in DTYPE_BYTES:
        return [f"dtype {step.dtype} cannot travel"]
    if not 1 <= len(step.shape) <= envelope.max_dims:
        found.append(f"tensor of {len(step.shape)} dimensions; 1 to {envelope.max_dims} are allowed")
    if math.prod(step.shape) != step.box.size or step.box.size == 0:
        found.append(f"tensor {step.shape} does not hold the box {step.box}")
    for word, side in (("source", step.source), ("target", step.target)):
        found += [f"{word}: {text}" for text in _side(step, side, envelope)]
    if set(step.source.ranks) & set(step.target.ranks):
        found.append(f"ranks {step.source.ranks} and {step.target.ranks} overlap")
    if found:
        return found
    pairs = [(e.source, e.target) for e in exchanges(step)]
    sources = Counter(t for _, t in set(pairs))
    targets = Counter(s for s, _ in set(pairs))
    if sources and max(sources.values()) > envelope.max_sources:
        found.append(f"a target hears {max(sources.values())} sources; {envelope.max_sources} are allowed")
    if targets and max(targets.values()) > envelope.max_targets:
        found.append(f"a source serves {max(targets.values())} targets; {envelope.max_targets} are allowed")
    return found


def _side(step: Step, side: Side, envelope: Envelope) -> list[str]:
    found: list[str] = []
    if not 1 <= len(side.mesh) <= 2 or any(n < 1 for n in side.mesh):
        return [f"mesh {side.mesh} is neither 1-D nor 2-D"]
    if len(side.placements) != len(side.mesh):
        return [f"{len(side.placements)} placements for mesh {side.mesh}"]
    cuts = [p.dim for p in side.placements if isinstance(p, Shard)]
    if len(cuts) != 1:
        return [f"{len(cuts)} shard axes; exactly one is allowed"]
    if not 0 <= cuts[0] < len(step.shape):
        return [f"shard axis {cuts[0]} of a tensor with {len(step.shape)} dimensions"]
    if step.shape[side.axis] % side.shards:
        found.append(f"{side.shards} shards do not divide extent {step.shape[side.axis]}")
    if len(side.parts) != len(side.ranks):
        return [*found, f"{len(side.parts)} local parts for {len(side.ranks)} ranks"]
    share = step.box.size // side.shards
    if share * DTYPE_BYTES[step.dtype] > envelope.max_local_bytes:
        found.append(f"a local share of more than {envelope.max_local_bytes} bytes")
    if any(part.box.size != share for part in side.parts):
        found.append(f"a local part does not hold the {share} elements of a shard")
    return found
