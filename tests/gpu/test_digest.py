"""Digests on a GPU: the same bits as on the host, by the kernel and by torch's own operations, and fast enough."""

from __future__ import annotations

import random

import pytest
import torch

from weightsync_engine.digest import MODULUS, _joined, _sum, box_digest, cuda, units_of
from weightsync_engine.layout.boxes import Box

DTYPES = [
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.float64,
]


def case(rng: random.Random) -> tuple[tuple[int, ...], Box]:
    rank = rng.choice([0, 1, 1, 2, 2, 3])
    limit = {0: 1, 1: 3_000_000, 2: 3000, 3: 150}[rank]
    shape = tuple(rng.randint(1, limit) for _ in range(rank))
    extent = tuple(rng.randint(1, n) for n in shape)
    return shape, Box(tuple(rng.randint(0, n - e) for n, e in zip(shape, extent, strict=True)), extent)


def test_the_kernel_is_there(device):
    assert cuda.kernel() is not None, "Triton cannot compile here: see the warning above"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_box_has_the_same_digest_on_gpu_and_host(device, dtype):
    rng = random.Random(str(dtype))
    held, wanted = [], []
    for _ in range(25):
        shape, box = case(rng)
        width = dtype.itemsize
        raw = torch.randint(0, 256, (box.size * width + 16,), dtype=torch.uint8)
        skip = rng.choice([0, 8])
        on_host = raw[skip : skip + box.size * width].view(dtype).view(box.shape)
        on_gpu = raw.to(device)[skip : skip + box.size * width].view(dtype).view(box.shape)
        wanted.append(box_digest(on_host, box, shape))
        assert box_digest(on_gpu, box, shape) == wanted[-1], (shape, box)
        assert int(_sum(on_gpu, _joined(box, shape))) % MODULUS == wanted[-1], (shape, box)
        held.append(units_of(on_gpu, _joined(box, shape)))
    assert cuda.Digests(held, _sum).sums() == wanted


def test_a_region_that_is_no_run_of_memory_has_the_digest_of_its_elements(device):
    whole = torch.randn(64, 96, dtype=torch.bfloat16)
    box = Box((0, 0), (64, 32))
    on_gpu = whole.to(device)[:, 32:64]
    assert box_digest(on_gpu, box, (64, 32)) == box_digest(whole[:, 32:64].contiguous(), box, (64, 32))


def test_one_flipped_bit_changes_the_digest(device):
    data = torch.randint(-(1 << 15), 1 << 15, (1 << 20,), dtype=torch.int16, device=device)
    box, before = Box((0,), (1 << 20,)), None
    before = box_digest(data, box, (1 << 20,))
    data[777_777] ^= 1 << 3
    assert box_digest(data, box, (1 << 20,)) != before


def test_sixteen_gigabytes_take_a_few_reads_of_them(device, record_property):
    """The number itself is for the benchmark; the bound only tells the kernel from torch's own operations."""
    free, _ = torch.cuda.mem_get_info(device)
    elements = min(8 << 30, free // 4 // (1 << 26) * (1 << 26))
    data = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    # Aligned as a slab's tensors are: other memory takes the kernel's slow way.
    parts = [units_of(p, [(0, p.numel(), p.numel())]) for p in data.split(elements // 399 // 128 * 128)]
    digests = cuda.Digests(parts, _sum)
    digests.sums()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    digests.sums()
    end.record()
    end.synchronize()
    ms = start.elapsed_time(end)
    record_property("digest", f"{data.nbytes / 1e9:.2f} GB in {ms:.2f} ms")
    print(
        f"\ndigest of {data.nbytes / 1e9:.2f} GB in {len(parts)} parts: {ms:.2f} ms ({data.nbytes / ms / 1e6:.0f} GB/s)"
    )
    assert ms < 16 * data.nbytes / 17e9 + 2
