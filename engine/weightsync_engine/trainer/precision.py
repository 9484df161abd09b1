"""Which casts on the way to the servers lose what the trainer meant to keep.

A server that holds fewer bits than the trainer's tensor is the usual case: master weights in fp32, served in bf16. It
is worth a word only where the trainer computes with more bits than it computes with elsewhere. A cast that loses bits
(of what the trainer *computes* with: under FSDP's mixed precision that is `param_dtype`, not the master's dtype) is
told for

- a buffer: master weights are parameters, a buffer that is wide is so on purpose;
- what the model declares to be kept in fp32 (`_keep_in_fp32_modules_strict` of transformers);
- a parameter that the trainer computes with in more bits than with most of the model.

All else is a master weight.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Cast:
    """What becomes of one of the trainer's tensors."""

    name: str
    elements: int
    computed: str
    """The dtype in which the trainer computes with it."""
    wire: str
    kept: bool
    """It is a buffer, or declared to be kept wide."""


def rounded(casts: Iterable[Cast]) -> dict[str, str]:
    """The casts that are worth a word: name -> the dtype in which the trainer computes."""
    casts = list(casts)
    most: Counter[str] = Counter()
    for cast in casts:
        if not cast.kept and _float(cast.computed) is not None:
            most[cast.computed] += cast.elements
    usual = max(most, key=lambda dtype: (most[dtype], dtype)) if most else ""
    return {
        cast.name: cast.computed
        for cast in casts
        if loses(cast.computed, cast.wire) and (cast.kept or loses(cast.computed, usual))
    }


def loses(have: str, wire: str) -> bool:
    """Whether some value of the one has no equal in the other; of floating point only."""
    a, b = _float(have), _float(wire)
    if a is None or b is None:
        return False
    return b.eps > a.eps or b.max < a.max or b.smallest_normal > a.smallest_normal


def _float(dtype: str) -> torch.finfo | None:
    found = getattr(torch, dtype, None) if dtype else None
    return torch.finfo(found) if isinstance(found, torch.dtype) and found.is_floating_point else None


def declared_wide(module: nn.Module | None) -> Callable[[str], bool]:
    """Whether a model declares, for a tensor of that name, that it stays in fp32 whatever the rest is in."""
    patterns = {
        pattern
        for part in (module.modules() if module is not None else ())
        for pattern in getattr(type(part), "_keep_in_fp32_modules_strict", None) or ()
    }
    if not patterns:
        return lambda name: False
    # By whole components, as transformers matches them.
    match = re.compile("|".join(rf"(?:^|\.){pattern}(?:\.|$)" for pattern in sorted(patterns)))
    return lambda name: match.search(name) is not None
