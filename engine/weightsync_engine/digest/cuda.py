"""Digests of tensors on a GPU: by one kernel over all of them, or by torch's own operations where there is no Triton.

Bit for bit what `weightsync_engine.digest` computes on the host.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from .tiles import Boxed, cut, fits

log = logging.getLogger(__name__)

Held = tuple[torch.Tensor, list[tuple[int, int, int]]]
"""A box's units, one after the other, and its joined dimensions."""
Kernel = Callable[[Sequence[Boxed], int, torch.Tensor], None]
_KEPT = 8
"""Sets of boxes whose tiles are kept on the device: a mover sums the same ones in every round."""


@functools.cache
def kernel() -> Kernel | None:
    """The Triton kernel, or None (with a warning) where Triton, or the compiler that it needs, is missing."""
    try:
        from .kernel import Work, add_digests

        @functools.lru_cache(_KEPT)
        def work(boxes: tuple[Boxed, ...], device: torch.device) -> Work:
            return Work.upload(cut(boxes), device)

        def launch(boxes: Sequence[Boxed], width: int, out: torch.Tensor) -> None:
            add_digests(work(tuple(boxes), out.device), width, out)

        out = torch.zeros(1, dtype=torch.int64, device="cuda")
        for width in (1, 2):
            # Both variants: 20 000 elements are a whole tile and a rest.
            data = torch.zeros(20_000 * width, dtype=torch.uint8, device="cuda")
            launch([Boxed(data.data_ptr(), 20_000, ((0, 20_000, 20_000),), 0)], width, out)
        torch.cuda.current_stream().synchronize()
    except Exception as e:
        log.warning("digests are computed without Triton, several times slower: %s: %s", type(e).__name__, e)
        return None
    return launch


def digests(
    held: Sequence[Held], by_torch: Callable[[torch.Tensor, list[tuple[int, int, int]]], torch.Tensor]
) -> list[int]:
    """The sum of each, in order; one wait for the GPU in all. `by_torch` gives one's sum as a tensor (int64)."""
    if not held:
        return []
    device = held[0][0].device
    with torch.cuda.device(device):
        out = torch.zeros(len(held), dtype=torch.int64, device=device)
        launch = kernel()
        of_width: dict[int, list[Boxed]] = defaultdict(list)
        keep: list[torch.Tensor] = []
        for slot, (flat, dims) in enumerate(held):
            if launch is None or not fits(dims):
                out[slot] = by_torch(flat, dims)
            elif flat.numel():
                keep.append(flat)  # a copy, where the region is no run of memory
                of_width[flat.element_size()].append(Boxed(flat.data_ptr(), flat.numel(), tuple(dims), slot))
        for width, boxes in of_width.items():
            assert launch is not None
            launch(boxes, width, out)
        return [value % (1 << 64) for value in out.tolist()]
