"""M2N's envelope: what every step must satisfy, checked apart from the compiler that makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..layout.tensors import DTYPE_BYTES, Shard
from .steps import Side, Step

IN_FLIGHT = 3
"""Steps that a transport works on at the same time: one is packed, one travels, one is unpacked."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Limits of one version of the library; others are another value, not other code."""

    max_dims: int = 3
    max_sources: int = 16
    """Source ranks that one target may hear."""
    max_targets: int = 64
    """Target ranks that one source may serve."""
    max_local_bytes: int = 256 << 20
    """Of a rank's share of one step. The library takes up to 2 GiB; the staging memory, `IN_FLIGHT + 1` times this on
    each rank, and the time until the first step has arrived grow with it."""
    stack_bytes: int = 0
    """From so many bytes of a rank's share on, like parameters are reshards of their own, one stack or more. 0: never,
    for transports that send straight between views."""


M2N = Envelope(stack_bytes=16 << 20)
"""nccl-extensions 0.1.0."""


def violations(step: Step, envelope: Envelope = M2N) -> list[str]:
    """What the step does that the library refuses, or hangs on; empty when it is inside."""
    found: list[str] = []
    if step.dtype not in DTYPE_BYTES:
        return [f"dtype {step.dtype} cannot travel"]
    if not 1 <= len(step.shape) <= envelope.max_dims:
        found.append(f"tensor of {len(step.shape)} dimensions; 1 to {envelope.max_dims} are allowed")
    if math.prod(step.shape) == 0:
        found.append(f"tensor {step.shape} is empty")
    for word, side in (("source", step.source), ("target", step.target)):
        found += [f"{word}: {text}" for text in _side(step, side, envelope)]
    if set(step.source.ranks) & set(step.target.ranks):
        found.append(f"ranks {step.source.ranks} and {step.target.ranks} overlap")
    if found:
        return found
    heard: dict[int, set[int]] = {}
    served: dict[int, set[int]] = {}
    for s, source in enumerate(step.source.ranks):
        held = step.source.local_box(step.shape, s)
        for t, target in enumerate(step.target.ranks):
            if held.intersect(step.target.local_box(step.shape, t)) is not None:
                heard.setdefault(target, set()).add(source)
                served.setdefault(source, set()).add(target)
    most = max(map(len, heard.values()))
    if most > envelope.max_sources:
        found.append(f"a target hears {most} sources; {envelope.max_sources} are allowed")
    most = max(map(len, served.values()))
    if most > envelope.max_targets:
        found.append(f"a source serves {most} targets; {envelope.max_targets} are allowed")
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
    share = math.prod(step.shape) // side.shards
    if share * DTYPE_BYTES[step.dtype] > envelope.max_local_bytes:
        found.append(f"a local share of more than {envelope.max_local_bytes} bytes")
    return found
