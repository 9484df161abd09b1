"""How boxes are cut into tiles, and a model of the kernel's arithmetic on them: the same bits as `box_digest`."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.digest import _LANES, MODULUS, _joined, box_digest, tiles, units_of
from weightsync_engine.digest.tiles import FAST_ALIGNMENT, TILE, Boxed, Kind, Tiles, cut, fits
from weightsync_engine.layout.boxes import Box

U64 = np.uint64
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def finish(z):
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def model(work: Tiles, width: int, slots: int) -> list[int]:
    """What the kernel does, tile by tile, with 32-bit places inside a row."""
    sums = [0] * slots
    kinds = np.repeat(np.array(list(Kind)), work.counts)
    for kind, box, within in zip(kinds, work.box, work.within, strict=True):
        address, count, start, extent, outer, whole, slot = (int(v) for v in work.rows[box])
        begin = int(within) * TILE
        held = min(TILE, count - begin)
        if kind != Kind.ANY:
            assert held == TILE and (address + begin * width) % FAST_ALIGNMENT == 0
            assert (extent == 0) == (kind == Kind.RUN)
        raw = (ctypes.c_char * (held * width)).from_address(address + begin * width)
        bits = np.frombuffer(raw, dtype=WORDS[width]).astype(U64)
        inside = np.arange(held, dtype=np.int64)
        if extent == 0:
            index = begin + start + inside
        else:
            place = np.int32(begin % extent) + inside.astype(np.int32)
            down = place // np.int32(extent)
            index = (begin // extent + outer + down.astype(np.int64)) * whole
            index += (place - down * np.int32(extent)).astype(np.int64) + start
        with np.errstate(over="ignore"):
            key = finish((index >> 2).astype(U64) * U64(0x9E3779B97F4A7C15)) | U64(1)
            lanes = np.array(_LANES, dtype=U64)
            if kind != Kind.ANY:
                assert (index.reshape(-1, 4) == index[::4, None] + np.arange(4)).all()
                assert (index[::4] % 4 == 0).all()
                four = ((bits + U64(1)).reshape(-1, 4) * lanes).sum(axis=1, dtype=U64)
                value = four * key[::4]
            else:
                value = (bits + U64(1)) * key * lanes[index & 3]
            sums[slot] = (sums[slot] + int(value.sum(dtype=U64))) % MODULUS
    return sums


@st.composite
def boxes(draw):
    rank = draw(st.integers(0, 2))
    shape = tuple(draw(st.integers(1, 40_000 if rank == 1 else 220)) for _ in range(rank))
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    return shape, Box(start, extent), draw(st.sampled_from([0, 8]))


@given(st.lists(boxes(), min_size=1, max_size=4), st.sampled_from(sorted(WORDS)), st.integers(0, 1000))
def test_the_kernels_arithmetic_gives_the_digest_of_every_box(cases, width, seed):
    held, wanted, memory = [], [], []
    generator = torch.Generator().manual_seed(seed)
    for slot, (shape, box, skip) in enumerate(cases):
        raw = torch.randint(0, 256, (box.size * width + 16,), dtype=torch.uint8, generator=generator)
        dtype = getattr(torch, {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}[width])
        tensor = raw[skip : skip + box.size * width].view(dtype).view(box.shape)
        memory.append(raw)
        flat, dims = units_of(tensor, _joined(box, shape))
        held.append(Boxed(flat.data_ptr(), flat.numel(), tuple(dims), slot))
        wanted.append(box_digest(tensor, box, shape))
    assert model(cut(held), min(width, 2), len(cases)) == wanted


@given(st.lists(st.tuples(st.integers(0, 5 * TILE), st.sampled_from([0, 2, 16])), max_size=6))
def test_tiles_cover_every_box_once_and_full_aligned_ones_have_a_kernel_of_their_own(wanted):
    work = cut([Boxed(4096 + skip, count, [(0, count, count)], i) for i, (count, skip) in enumerate(wanted)])
    seen = sorted(zip(work.box.tolist(), work.within.tolist(), strict=True))
    assert seen == [(i, t) for i, (count, _) in enumerate(wanted) for t in range(-(-count // TILE))]
    assert work.counts[Kind.RUN] == sum(count // TILE for count, skip in wanted if skip != 2)
    for box, within in list(zip(work.box, work.within, strict=True))[: work.counts[Kind.RUN]]:
        assert wanted[box][1] != 2 and (within + 1) * TILE <= wanted[box][0]


@pytest.mark.parametrize(
    ("dims", "good"),
    [([], True), ([(0, 1 << 40, 1 << 40)], True), ([(0, 2, 2), (0, tiles.MAX_EXTENT + 1, 1 << 40)], False),
     ([(0, 1, 2), (0, 1, 2), (0, 1, 2)], False)],
)  # fmt: skip
def test_what_the_kernel_does_not_cover_is_told(dims, good):
    assert fits(dims) == good
