"""Copies between many tensors at once: as few kernels as there are kinds of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALONE_BYTES = 1 << 20
"""From here on a copy of its own, which is the driver's and the fastest, costs less than its launch."""


class Copies:
    """Copies of sources into targets, cast where dtypes differ; worked out once, done as often as wanted.

    torch fuses a list of pairs only if all are of the same dtypes, devices and strides; one pair that is not would
    make every copy of the list a launch of its own, so pairs are sorted by that. Pairs of one dtype are copied as
    integers, because fused copies of floating point change the bits of NaNs, and as the widest that fit, because
    copies between unlike strides take as long as they have elements.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._alone: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        """(target, source, whether the host need not wait)."""
        self._fused: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            alike = target.stride() == source.stride()
            if target.dtype == source.dtype:
                target, source = _as_integers(target, source)
                if (
                    alike
                    and target.is_contiguous()
                    and target.numel() * target.element_size() >= _ALONE_BYTES
                ):
                    self._alone.append((target, source, target.is_cuda and source.is_cuda))
                    continue
            key = (target.dtype, source.dtype, target.device, source.device, alike)
            into, of = self._fused.setdefault(key, ([], []))
            into.append(target)
            of.append(source)

    def run(self) -> None:
        """On the current stream; returns at once on a GPU, and blocks where one side is the host's memory, which the
        caller may change as soon as this returns."""
        for target, source, at_once in self._alone:
            target.copy_(source, non_blocking=at_once)
        for into, of in self._fused.values():
            torch._foreach_copy_(into, of)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`Copies`, once."""
    Copies(targets, sources).run()


def _as_integers(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory of two tensors of one dtype and shape as the widest integers that suit both."""
    if one.is_contiguous() and other.is_contiguous():
        one, other = one.view(-1), other.view(-1)
    own = one.element_size()
    if own not in _BITS:
        return one, other
    wider = (w for w in (8, 4, 2) if w > own and _suits(one, w // own) and _suits(other, w // own))
    kind = _BITS[next(wider, own)]
    return one.view(kind), other.view(kind)


def _suits(tensor: torch.Tensor, times: int) -> bool:
    """Whether a tensor can be seen as one of elements `times` as wide."""
    if not tensor.ndim or not tensor.numel() or tensor.stride(-1) != 1:
        return False
    numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return not any(n % times for n in numbers) and tensor.data_ptr() % (times * tensor.element_size()) == 0


def same_bits(one: torch.Tensor, other: torch.Tensor, chunk: int = 1 << 24) -> bool:
    """Whether two tensors of one shape and dtype are equal bit for bit; takes little memory beside them."""
    a, b = one.reshape(-1), other.reshape(-1)
    width = _BITS[a.element_size()]
    a, b = a.view(width), b.view(width)
    return all(
        torch.equal(a[start : start + chunk], b[start : start + chunk])
        for start in range(0, a.numel(), chunk)
    )
