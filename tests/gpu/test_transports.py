"""Plans of every kind of layout, over NCCL between ranks that share the GPUs of this host, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.plan.helpers import manifest
from tests.unit.engine.plan.test_compile import one_parameter
from tests.unit.engine.plan.test_stacks import layered

from weightsync_engine.layout.codec import encode_sources, encode_worker
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.validate import IN_FLIGHT
from weightsync_engine.transport.store import open_store

PARAMETERS = 40
DEADLINE = 120


@st.composite
def wide_worlds(draw: Any) -> tuple[Any, list[Worker], int]:
    """Many parameters, each laid out in a way of its own, for two or three servers."""
    trainers = draw(st.sampled_from([1, 3, 4]))
    servers = draw(st.sampled_from([[1], [2, 2], [4], [2, 1]]))
    made = [draw(one_parameter(f"p{i}", trainers, servers)) for i in range(PARAMETERS)]
    params = {s.name: (s.shape, s.dtype) for s, _ in made}
    workers = []
    for number, size in enumerate(servers):
        for _ in range(size):
            at = len(workers)
            places = {s.name: spots[at] for s, spots in made}
            workers.append(Worker(trainers + at, f"server-{number}", manifest(params, places)))
    return [s for s, _ in made], workers, trainers


def run(
    folder: Path, transport: str, world: Any, step_bytes: int = 256 << 20, rounds: int = 2
) -> list[dict[str, Any]]:
    """All ranks, each a process; returns what each one found."""
    sources, workers, trainers = world
    store, where = open_store("127.0.0.1")
    name = uuid.uuid4().hex[:8]
    job = folder / f"{name}.json"
    job.write_text(
        json.dumps({
            "name": name, "transport": transport, "trainers": trainers, "step_bytes": step_bytes, "rounds": rounds,
            "store": f"{where.host}:{where.port}", "out": str(folder),
            "sources": encode_sources(tuple(sources)).decode(),
            "workers": [
                {"rank": w.rank, "server": w.server, "manifest": encode_worker(w.manifest).decode()} for w in workers
            ],
        })
    )  # fmt: skip
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ranks = range(trainers + len(workers))
    started = [
        subprocess.Popen([sys.executable, "-m", "tests.gpu.rank_main", str(job), str(r)], env=environment)
        for r in ranks
    ]
    until = time.monotonic() + DEADLINE
    try:
        codes = [p.wait(max(until - time.monotonic(), 0.1)) for p in started]
    finally:
        for p in started:
            p.kill()
        del store
    assert codes == [0] * len(codes)
    return [json.loads((folder / f"{name}-{r}.json").read_text()) for r in ranks]


@pytest.mark.parametrize("transport", ["nccl_m2n", "nccl_p2p"])
def test_any_layout_arrives_bit_for_bit_and_nothing_beside_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, transport: str
) -> None:
    @given(wide_worlds(), st.sampled_from([512, 4096, 256 << 20]))
    @settings(
        max_examples=int(os.environ.get("WEIGHTSYNC_GPU_EXAMPLES", "3")), deadline=None, derandomize=True,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def arrives(world: Any, step_bytes: int) -> None:
        found = run(tmp_path_factory.mktemp("plan"), transport, world, step_bytes)
        assert [f["wrong"] for f in found] == [[]] * len(found)
        assert found[0]["steps"] > 0
        # Of M2N each step in flight has a buffer of its own.
        shares = IN_FLIGHT if transport == "nccl_m2n" else 1
        for f in found:
            assert f["staged"] <= shares * (f["share"] + 512 * f["parts"])
        most.append(max(f["staged"] for f in found))

    most: list[int] = []
    arrives()
    assert max(most) > 0, "nothing was staged: the test shows nothing"


def test_stacks_of_any_layout_arrive_bit_for_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    stacked = 0

    @given(layered(), st.sampled_from([512, 256 << 20]))
    @settings(
        max_examples=int(os.environ.get("WEIGHTSYNC_GPU_EXAMPLES", "4")), deadline=None, derandomize=True,
        database=None, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def arrives(world: Any, step_bytes: int) -> None:
        nonlocal stacked
        found = run(tmp_path_factory.mktemp("stacks"), "nccl_m2n", world, step_bytes)
        assert [f["wrong"] for f in found] == [[]] * len(found)
        stacked += found[0]["stacked"]

    arrives()
    assert stacked > 0
