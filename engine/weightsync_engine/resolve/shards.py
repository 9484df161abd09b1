"""Pure: which elements of a checkpoint parameter a tensor-parallel layer keeps, along the one dimension it
cuts.

The sizes and ranks are the layer's own, not the process's: a layer inside a TP group may well not be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rerun:
    """vLLM's own loader can fill a live tensor again, with the checkpoint's whole parameters."""

    modules: tuple[str, ...] = ()
    """Paths of modules that do more to it after load (another layout, something derived): these go through
    vLLM's layerwise reload. None: loading is all there is."""


class Unresolvable(ValueError):
    """Why a live tensor cannot be written directly. The text is shown to the user as it is.

    `rerun`: what vLLM's loader could do instead; None: nothing that is known to be right.
    """

    def __init__(self, text: str, rerun: Rerun | None = None) -> None:
        super().__init__(text)
        self.rerun = rerun


@dataclass(frozen=True, slots=True)
class Run:
    """Along the cut dimension: elements `[start, start + length)` of a checkpoint parameter that has `whole`
    of them are held from `at` on in the live tensor."""

    start: int
    whole: int
    length: int
    at: int


def even(whole: int, size: int, rank: int) -> Run:
    """The share of `rank` when `whole` elements are cut evenly over `size` ranks."""
    if not 0 <= rank < size:
        raise Unresolvable(f"the layer says that it is rank {rank} of {size}")
    if whole % size:
        raise Unresolvable(f"{whole} elements do not divide evenly over {size} ranks")
    length = whole // size
    return Run(rank * length, whole, length, 0)


def merged(wholes: Sequence[int], size: int, rank: int) -> list[Run]:
    """Several parameters side by side in one live tensor, each cut evenly (gate and up)."""
    runs, at = [], 0
    for whole in wholes:
        share = even(whole, size, rank)
        runs.append(Run(share.start, whole, share.length, at))
        at += share.length
    return runs


def qkv(
    heads: int, kv_heads: int, head_size: int, v_head_size: int, size: int, rank: int
) -> tuple[Run, Run, Run]:
    """q, k and v of one worker. With fewer KV heads than ranks each KV head stays whole, and `size /
    kv_heads` neighbouring ranks hold the same one.

    Args:
        heads: query heads of the whole model.
        kv_heads: key/value heads of the whole model.
        head_size, v_head_size: elements of one head.
        size, rank: the layer's own tensor-parallel size and rank.
    Raises:
        Unresolvable: if heads do not divide over the ranks; the message has both numbers.
    """
    if heads % size:
        raise Unresolvable(f"{heads} attention heads do not divide evenly over {size} ranks")
    q = even(heads * head_size, size, rank)
    if kv_heads >= size:
        if kv_heads % size:
            raise Unresolvable(f"{kv_heads} KV heads do not divide evenly over {size} ranks")
        local, shard = kv_heads // size, rank
    else:
        if size % kv_heads:
            raise Unresolvable(
                f"{kv_heads} KV heads over {size} ranks: neither number divides the other, "
                "so no rank can hold whole heads"
            )
        local, shard = 1, rank // (size // kv_heads)
    k_len, v_len = local * head_size, local * v_head_size
    return (
        q,
        Run(shard * k_len, kv_heads * head_size, k_len, q.length),
        Run(shard * v_len, kv_heads * v_head_size, v_len, q.length + k_len),
    )


def fused(runs: Sequence[Run]) -> list[Run]:
    """The same runs when the checkpoint itself holds the parameters side by side, under one name."""
    whole, shifted, before = sum(r.whole for r in runs), [], 0
    for run in runs:
        shifted.append(Run(before + run.start, whole, run.length, run.at))
        before += run.whole
    return shifted


def vocabulary(vocabulary_size: int, start: int, stop: int, rows: int) -> Run:
    """The rows of a vocabulary-parallel embedding or head: `[start, stop)` of the unpadded vocabulary, kept
    at the beginning of `rows` live rows, of which the rest is padding that nothing writes. `start == stop` is
    a worker that holds padding only."""
    if not 0 <= start <= stop <= vocabulary_size or stop - start > rows:
        raise Unresolvable(
            f"vocabulary rows [{start}, {stop}) of {vocabulary_size} do not fit {rows} live rows"
        )
    return Run(start, vocabulary_size, stop - start, 0)
