"""Slabs in device memory: shared by CUDA IPC, stamped in stream order, given back on every way out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import pytest
import torch

from weightsync_engine.layout.tensors import SlabTensor
from weightsync_engine.mover.cuda import open_device
from weightsync_engine.mover.memory import Needs, check_memory
from weightsync_engine.mover.slab import Slab, SlabError

BIG = 256 << 20
PLACE = SlabTensor(0, (BIG // 4,), "float32")
CHILD = """
import sys, torch
from weightsync_engine.layout.tensors import SlabTensor
from weightsync_engine.mover.slab import Slab
slab = Slab.attach(int(sys.argv[1]))
view = slab.tensor(SlabTensor(0, (int(sys.argv[2]),), "float32"))
for line in sys.stdin:
    word = line.strip()
    if word == "read":
        stamp = slab.read_stamp()
        print(stamp.version if stamp else "none", view.min().item(), view.max().item(), flush=True)
    elif word == "wait":
        stamp = slab.wait_stamp(30)
        print(stamp.version if stamp else "none", view.min().item(), view.max().item(), flush=True)
    else:
        slab.begin_write(); view.fill_(float(word)); torch.cuda.synchronize(); slab.stamp("from-child", 1)
        print("ok", flush=True)
"""


class Child:
    def __init__(self, slab: Slab) -> None:
        from weightsync_engine.mover.cuda import visible_to_child

        env = {**os.environ, **visible_to_child(slab.gpu.uuid, dict(os.environ))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(slab.fd), str(PLACE.shape[0])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, pass_fds=(slab.fd,),
        )  # fmt: skip

    def ask(self, word: str) -> list[str]:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture
def slab(device):
    made = Slab.create(BIG, device)
    yield made
    made.close()


def busy(device: torch.device, ms: float) -> None:
    """Keep the current stream at work for about so long."""
    torch.cuda._sleep(int(ms * 1.8e6))


def test_another_process_sees_what_this_one_wrote_and_the_other_way(slab):
    child = Child(slab)
    assert child.ask("read") == ["none", "0.0", "0.0"]
    slab.begin_write()
    slab.tensor(PLACE).fill_(3.0)
    slab.stamp_after_copies("step-1", 1)
    assert child.ask("wait") == ["step-1", "3.0", "3.0"]
    assert child.ask("5") == ["ok"]
    assert slab.read_stamp().version == "from-child"
    assert bool((slab.tensor(PLACE) == 5).all())
    child.end()


def test_publishing_does_not_wait_and_the_stamp_shows_behind_the_copies(slab, device):
    child = Child(slab)
    assert child.ask("read")[0] == "none"
    for turn in range(1, 20):
        source = torch.full((BIG // 4,), float(turn), device=device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        busy(device, 60)
        slab.begin_write()
        slab.tensor(PLACE).copy_(source)
        slab.stamp_after_copies(f"step-{turn}", turn)
        took = time.perf_counter() - started
        assert slab.read_stamp() is None, "the stamp showed before the stream had done its work"
        assert took < 0.04, f"publishing took {took * 1e3:.1f} ms of host time: it waits"
        assert child.ask("wait") == [f"step-{turn}", f"{turn}.0", f"{turn}.0"]
    child.end()


def test_a_stamp_in_order_works_on_the_default_stream_and_on_others(slab, device):
    assert slab._word_for_gpu, "the GPU cannot write to the slab's header here"
    for turn, stream in enumerate([torch.cuda.default_stream(device), torch.cuda.Stream(device)], 1):
        with torch.cuda.stream(stream):
            slab.begin_write()
            slab.tensor(PLACE).fill_(turn)
            slab.stamp_after_copies(f"step-{turn}", turn)
        assert slab.wait_stamp(10).sequence == turn


def test_a_killed_child_leaves_the_memory_to_the_next_one(slab):
    for turn in range(3):
        child = Child(slab)
        assert child.ask(str(turn)) == ["ok"]
        child.process.kill()
        child.process.wait(30)
        assert bool((slab.tensor(PLACE) == turn).all())


def test_all_memory_comes_back(device):
    gpu = open_device(device)
    warm = Slab.create(BIG, device)
    warm.close()
    del warm
    gc.collect()
    before = gpu.memory()[0]
    for _ in range(5):
        slab = Slab.create(BIG, device)
        child = Child(slab)
        child.ask("read")
        slab.close()  # before the child has let go of it
        del slab
        gc.collect()
        child.end()
    assert abs(gpu.memory()[0] - before) < 64 << 20


def test_closing_while_copies_are_still_to_come_is_safe(device):
    slab = Slab.create(BIG, device)
    busy(device, 100)
    slab.begin_write()
    slab.tensor(PLACE).fill_(1.0)
    slab.stamp_after_copies("step-1", 1)
    slab.close()
    del slab
    gc.collect()
    torch.cuda.synchronize()
    assert torch.ones(8, device=device).sum().item() == 8


def test_a_slab_larger_than_the_gpu_is_refused_in_bytes(device):
    total = open_device(device).memory()[1]
    with pytest.raises(SlabError, match=f"no memory for a slab of {2 * total} bytes"):
        Slab.create(2 * total, device)
    with pytest.raises(SlabError, match=f"{total} bytes .* too little; do this"):
        check_memory(Needs("shadow", 3 * total, 0, 0), device, "do this")


def test_slabs_work_whatever_allocator_torch_uses(device):
    script = (
        "import torch\n"
        "from weightsync_engine.mover.slab import Slab\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
        "s = Slab.create(1 << 26, 'cuda')\n"
        "assert s.read_stamp() is None and not s._payload.any()\n"
        "print('fine')\n"
    )
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=110
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_the_copy_of_many_tensors_runs_at_the_speed_of_memory(device):
    from weightsync_engine.transport.copies import copy_all

    free = torch.cuda.mem_get_info(device)[0]
    size = min(41 << 20, free // 5 // 399 // 512 * 512)
    sources = [torch.zeros(size // 2, dtype=torch.bfloat16, device=device) for _ in range(399)]
    targets = [torch.empty_like(s) for s in sources]
    copy_all(targets, sources)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    copy_all(targets, sources)
    end.record()
    end.synchronize()
    ms, gb = start.elapsed_time(end), 399 * size / 1e9
    print(
        f"\ncopy of {gb:.2f} GB in 399 tensors: {ms:.2f} ms ({2 * gb / ms * 1e3:.0f} GB/s read and written)"
    )
    assert ms < 40 * gb / 16 + 10
