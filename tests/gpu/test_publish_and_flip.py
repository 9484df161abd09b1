"""The two local copies: a trainer's weights into its snapshot, a worker's shadow into its live weights."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from tests.integration.agent.tokens import Cluster

from weightsync_engine.layout.tensors import WorkerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.resolve.manifest import Resolved
from weightsync_engine.trainer.handle import PublishError
from weightsync_engine.trainer.publisher import Publisher
from weightsync_engine.vllm.shadow import Flipped, Shadow

GB = 10**9


@pytest.fixture
def env(tmp_path, monkeypatch):
    for name, value in Cluster(tmp_path).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WEIGHTSYNC_STAGING_MIB", "256")


def model(device: torch.device, total: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    each = total // 100 // dtype.itemsize // 512 * 512
    return {
        f"layer.{i}": torch.full((each // 512, 512), float(i), dtype=dtype, device=device) for i in range(100)
    }


def test_publish_returns_without_waiting_for_the_stream_and_casts(env, device):
    weights = model(device, 2 * GB, torch.float32)
    # CUDA loads a kernel at its first launch, which waits for all earlier work: the loop's own must not do so.
    weights["layer.0"].add_(0.0)
    torch.cuda._sleep(1)
    with Publisher(weights.items(), port=0, dtype=torch.bfloat16) as publisher:
        for turn in range(1, 6):
            torch.cuda.synchronize()
            torch.cuda._sleep(int(1e9))  # about 500 ms of training work before
            began = time.perf_counter()
            publisher.publish(f"step-{turn}")
            took = time.perf_counter() - began
            assert took < 0.25
            assert publisher._slab.read_stamp() is None, "the stamp showed before the copies"
            for tensor in weights.values():
                tensor.add_(1.0)  # training goes on at once
            assert time.perf_counter() - began < 0.25
            assert publisher._slab.read_stamp() is None, "the stamp showed before the copies"
            stamp = publisher._slab.wait_stamp(30)
            assert stamp.version == f"step-{turn}"
            for i, name in enumerate(weights):
                assert bool((publisher._views[name] == i + turn - 1).all()), (turn, name)
            print(f"\npublish held the host for {took * 1e3:.2f} ms")
    del publisher
    gc.collect()


def test_the_stop_of_the_training_stream(env, device):
    free = torch.cuda.mem_get_info(device)[0]
    weights = model(device, min(16 * GB, free // 4), torch.bfloat16)
    size = sum(t.nbytes for t in weights.values())
    with Publisher(weights.items(), port=0) as publisher:
        publisher.publish("warm")
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        publisher.publish("step-1")
        end.record()
        end.synchronize()
        print(f"\nsnapshot of {size / GB:.2f} GB: {start.elapsed_time(end):.2f} ms on the training stream")
        assert publisher._slab.wait_stamp(5).version == "step-1"


def test_a_snapshot_that_does_not_fit_is_told_in_bytes(env, device):
    total = torch.cuda.get_device_properties(device).total_memory
    big = {"w": torch.empty(total * 6 // 10, dtype=torch.uint8, device=device)}
    with pytest.raises(PublishError, match=r"not enough memory on cuda:0 .* bytes .* for the snapshot"):
        Publisher(big.items(), port=0)
    del big
    torch.cuda.empty_cache()


def test_a_verified_shadow_becomes_live_and_the_first_flip_compares_it(device):
    free = torch.cuda.mem_get_info(device)[0]
    total = min(16 * GB, free // 4)
    live = model(device, total, torch.bfloat16)
    live["turned"] = torch.zeros(64, 32, device=device).T
    tensors, size = plan_slab(
        (name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in live.items()
    )
    slab = Slab.create(size, device)
    shadow = Shadow(Resolved(WorkerManifest({}, (), tensors, {}), size, live, ""), slab)
    for round_ in (1, 2, 3):
        slab.begin_write()
        for i, tensor in enumerate(shadow._next):
            tensor.fill_(i + round_)
        torch.cuda.synchronize()
        slab.stamp(f"step-{round_}", round_)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        assert shadow.flip(Flipped("uid", 1, round_, f"step-{round_}")) is None
        more = torch.cuda.max_memory_allocated(device) - before
        for i, tensor in enumerate(live.values()):
            assert bool((tensor == i + round_).all())
        print(f"\nflip of {size / GB:.2f} GB: {shadow.seconds * 1e3:.2f} ms, {more / 1e6:.1f} MB beside")
        assert more < 64 << 20
    slab.close()
