"""The Triton kernel itself, in Triton's interpreter: the same bits as `box_digest`, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch
from weightsync_engine.digest import _joined, box_digest, units_of
from weightsync_engine.digest.kernel import Work, add_digests
from weightsync_engine.digest.tiles import TILE, Boxed, cut
from weightsync_engine.layout.boxes import Box

seen = [0, 0, 0]
for shape, box in [
    ((2 * TILE,), Box((0,), (2 * TILE,))),  # one run in fours
    ((70_000,), Box((3,), (66_000,))),  # one run that begins between
    ((300, 512), Box((4, 128), (260, 256))),  # rows in fours
    ((300, 517), Box((4, 100), (260, 301))),  # rows of odd length
    ((5,), Box((1,), (3,))),
]:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        raw = torch.randint(0, 256, (box.size * dtype.itemsize,), dtype=torch.uint8)
        tensor = raw.view(dtype).view(box.shape)
        flat, dims = units_of(tensor, _joined(box, shape))
        work = Work.upload(cut([Boxed(flat.data_ptr(), flat.numel(), tuple(dims), 1)]), torch.device("cpu"))
        out = torch.zeros(2, dtype=torch.int64)
        add_digests(work, flat.element_size(), out)
        assert out[0] == 0 and out[1].item() % (1 << 64) == box_digest(tensor, box, shape), (shape, box, dtype)
        seen = [a + b for a, b in zip(seen, work.counts)]
print(*seen)
"""


def test_every_path_of_the_kernel_gives_the_digest_of_the_box():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run, rows, rest = map(int, done.stdout.split())
    assert run > 5 and rows > 5 and rest > 5
