"""Copies between many tensors at once: as few kernels as there are kinds of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_ALONE_BYTES = 1 << 20
"""From here on a copy of its own, which is the driver's and the fastest, costs less than its launch."""


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, cast where dtypes differ, on the current stream; returns at once on a GPU.

    torch fuses a list of pairs only if all are of the same dtypes, devices and strides; one pair that is not would
    make every copy of the list a launch of its own, so pairs are sorted by that.
    """
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = target.stride() == source.stride()
        if target.dtype == source.dtype:  # as integers: fused copies change the bits of NaNs
            target, source = (
                target.view(_BITS[target.element_size()]),
                source.view(_BITS[source.element_size()]),
            )
            if alike and target.is_contiguous() and target.numel() * target.element_size() >= _ALONE_BYTES:
                target.copy_(source, non_blocking=target.is_cuda and source.is_cuda)
                continue
        key = (target.dtype, source.dtype, target.device, source.device, alike)
        into, of = groups.setdefault(key, ([], []))
        into.append(target)
        of.append(source)
    for into, of in groups.values():
        # Blocking beside the host, whose memory the caller may change as soon as this returns.
        torch._foreach_copy_(into, of)


def same_bits(one: torch.Tensor, other: torch.Tensor, chunk: int = 1 << 24) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit; takes little memory beside them."""
    a, b = one.reshape(-1), other.reshape(-1)
    width = _BITS[a.element_size()]
    a, b = a.view(width), b.view(width)
    return all(
        torch.equal(a[start : start + chunk], b[start : start + chunk])
        for start in range(0, a.numel(), chunk)
    )
