"""What the plugin changes in vLLM itself, with vLLM's own classes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from weightsync_engine.vllm.plugin import register


@pytest.fixture
def queue() -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """Writer and reader of a queue in shared memory, as between the engine core and a worker."""
    writer = MessageQueue(1, 1, max_chunk_bytes=4096, max_chunks=4)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join(10)
    yield writer, reader


def test_a_call_whose_ping_is_lost_reaches_an_idle_worker_all_the_same(queue, monkeypatch):
    writer, reader = queue
    register()
    reader._spin_condition.last_read = float("-inf")  # idle for long: it waits for a ping, and spins no more
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)  # the fault
    waits, wait = threading.Event(), reader._spin_condition.wait
    monkeypatch.setattr(reader._spin_condition, "wait", lambda timeout_ms: waits.set() or wait(timeout_ms))
    heard: list[tuple[object, float]] = []
    worker = threading.Thread(
        target=lambda: heard.append((reader.dequeue(timeout=20), time.monotonic())), daemon=True
    )
    worker.start()
    assert waits.wait(10)
    called = time.monotonic()
    writer.enqueue("pause")
    worker.join(20)
    assert heard and heard[0][0] == "pause"
    assert heard[0][1] - called < 1.0
