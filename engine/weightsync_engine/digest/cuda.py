"""Digests of tensors on a GPU: by one kernel over all of them, or by torch's own operations where there is no Triton.

Bit for bit what `weightsync_engine.digest` computes on the host.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .tiles import TILE, Boxed, cut, fits

log = logging.getLogger(__name__)

Held = tuple[torch.Tensor, list[tuple[int, int, int]]]
"""A box's units, one after the other, and its joined dimensions."""
ByTorch = Callable[[torch.Tensor, list[tuple[int, int, int]]], torch.Tensor]
"""The sum of one, as a tensor (int64)."""


@dataclass(frozen=True)
class Kernel:
    upload: Callable[[Sequence[Boxed], torch.device], Any]
    """Work of boxes of one width, to be launched as often as wanted."""
    launch: Callable[[Any, int, torch.Tensor], None]
    """Add the sums of (work, of this width) to their slots."""


@functools.cache
def kernel() -> Kernel | None:
    """The Triton kernel, or None (with a warning) where Triton, or the compiler that it needs, is missing."""
    try:
        from .kernel import Work, add_digests

        made = Kernel(lambda boxes, device: Work.upload(cut(boxes), device), add_digests)
        out = torch.zeros(1, dtype=torch.int64, device="cuda")
        for width in (1, 2):
            # All kinds: a run of a whole tile and a rest, and rows of a whole tile.
            data = torch.zeros((TILE + 1) * width, dtype=torch.uint8, device="cuda")
            run, rows = ((0, TILE + 1, TILE + 1),), ((0, TILE // 8, TILE), (0, 8, 16))
            boxes = [Boxed(data.data_ptr(), TILE + 1, run, 0), Boxed(data.data_ptr(), TILE, rows, 0)]
            made.launch(made.upload(boxes, data.device), width, out)
        torch.cuda.current_stream().synchronize()
    except Exception as e:
        log.warning("digests are computed without Triton, several times slower: %s: %s", type(e).__name__, e)
        return None
    return made


class Digests:
    """The sums of boxes that stay where they are: worked out and sent to the device once, summed as often as
    wanted."""

    def __init__(self, held: Sequence[Held], by_torch: ByTorch) -> None:
        self._by_torch = by_torch
        self._count = len(held)
        self._device = held[0][0].device if held else torch.device("cuda")
        self._others: list[tuple[int, Held]] = []
        self._keep: list[torch.Tensor] = []
        self._work: list[tuple[Any, int]] = []
        with torch.cuda.device(self._device):
            self._kernel = kernel() if held else None
            of_width: dict[int, list[Boxed]] = defaultdict(list)
            for slot, (flat, dims) in enumerate(held):
                if self._kernel is None or not fits(dims):
                    self._others.append((slot, (flat, dims)))
                elif flat.numel():
                    self._keep.append(flat)
                    of_width[flat.element_size()].append(
                        Boxed(flat.data_ptr(), flat.numel(), tuple(dims), slot)
                    )
            if self._kernel is not None:
                self._work = [
                    (self._kernel.upload(boxes, self._device), width) for width, boxes in of_width.items()
                ]

    def sums(self) -> list[int]:
        """In order; one wait for the GPU in all."""
        if not self._count:
            return []
        with torch.cuda.device(self._device):
            out = torch.zeros(self._count, dtype=torch.int64, device=self._device)
            for slot, (flat, dims) in self._others:
                out[slot] = self._by_torch(flat, dims)
            for work, width in self._work:
                assert self._kernel is not None
                self._kernel.launch(work, width, out)
            return [value % (1 << 64) for value in out.tolist()]
