"""A publisher whose snapshot is in device memory, on a GPU made of host memory: everything but CUDA itself."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from tests.fake_gpu import FakeDevice, in_place, mover_environment
from tests.integration.agent.tokens import Cluster

from weightsync_engine.mover.memory import CONTEXT_BYTES
from weightsync_engine.trainer.handle import PublishError
from weightsync_engine.trainer.publisher import Publisher


@pytest.fixture
def weights(monkeypatch, tmp_path):
    for name, value in (mover_environment() | Cluster(tmp_path).environment()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WEIGHTSYNC_STAGING_MIB", "16")
    return {"a": torch.zeros(8, 4), "b": torch.zeros(3)}


def test_publish_returns_before_its_copies_have_ended_and_skips_no_later_version(weights):
    with in_place(FakeDevice(total=2 << 30)) as gpu:
        with Publisher(weights.items(), port=0, device="cuda:0", dtype=torch.bfloat16) as publisher:
            waits = gpu.waits
            publisher.publish("step-1")
            assert gpu.pending and publisher._slab.read_stamp() is None
            weights["a"].fill_(2.0)
            publisher.publish("step-2")
            gpu.run()
            assert gpu.waits == waits
            deadline = time.monotonic() + 10
            while (stamp := publisher._slab.read_stamp()) is None:
                assert time.monotonic() < deadline
            assert stamp.version == "step-2"
            assert (publisher._views["a"] == 2).all() and publisher._views["a"].dtype == torch.bfloat16
        del publisher
        gc.collect()
        assert gpu.used == 0 and not gpu.registered


def test_a_gpu_without_room_for_the_snapshot_is_told_in_bytes_when_the_publisher_is_made(weights):
    with in_place(FakeDevice(total=1 << 30)) as gpu:
        with pytest.raises(PublishError) as e:
            Publisher(weights.items(), port=0, device="cuda:0")
        for words in (
            "for the snapshot",
            f"{2 * CONTEXT_BYTES} bytes",
            "16777216 bytes",
            "free are 1073741824 bytes",
            "shard",
        ):
            assert words in str(e.value)
        assert gpu.used == 0
