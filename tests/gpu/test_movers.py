"""Real movers over device memory and NCCL, all ranks on one GPU: two trainers, two servers at tp 2.

NCCL needs NCCL_MULTI_RANK_GPU_ENABLE=1 for that, in the environment of these tests. The libnccl that movers load is
the one that LD_PRELOAD names, or the nvidia-nccl wheel on PYTHONPATH.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from tests.integration.mover.fleet import Fleet, make, stopped, until

from weightsync_engine.mover.cuda import open_device
from weightsync_engine.mover.memory import CONTEXT_BYTES
from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.protocol.messages import RoundPhase

MIB = 1 << 20
TRANSPORTS = ["nccl_p2p", "nccl_m2n"]
RANKS = range(6)

pytestmark = pytest.mark.timeout(240)


async def start(folder, layers=2, **options) -> Fleet:
    return await Fleet.start(folder, layers, device="cuda:0", **options)


async def join(fleet: Fleet, transport: str, deadline: float = 90.0) -> None:
    await fleet.join(deadline, **{f"rank_{r}": {"transport": transport} for r in RANKS})


async def round_of(fleet: Fleet, version: str, deadline: float = 60.0) -> float:
    fleet.publish(version)
    fleet.transfer(version, deadline)
    states = await fleet.transferred(deadline + 5)
    fleet.check_bits()
    return max(s.round.seconds for s in states)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_rounds_arrive_bit_for_bit(tmp_path, transport):
    fleet = await start(tmp_path / "run", layers=4, staging_bytes=256 * MIB)
    try:
        await join(fleet, transport)
        took = [await round_of(fleet, f"step-{i}") for i in range(1, 6)]
        print(f"\n{transport}: rounds of a small model in ms: {[round(1e3 * t, 1) for t in took]}")
    finally:
        await fleet.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_two_epochs_in_a_row_use_the_same_movers(tmp_path, transport):
    fleet = await start(tmp_path / "run", staging_bytes=256 * MIB)
    try:
        for epoch in (1, 2):
            await join(fleet, transport)
            await round_of(fleet, f"step-{epoch}")
    finally:
        await fleet.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_killed_mover_is_replaced_and_the_next_epoch_is_good(tmp_path, transport):
    fleet = await start(tmp_path / "run", spare=(3,))
    try:
        await join(fleet, transport)
        await round_of(fleet, "step-1")
        victim = fleet.members[3]
        state = victim.client.state
        os.kill(state.pid, signal.SIGKILL)
        await fleet.new_mover(victim, state.mover_id)
        await join(fleet, transport)
        await round_of(fleet, "step-2")
    finally:
        await fleet.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_frozen_mover_ends_the_round_by_its_deadline_and_is_named(tmp_path, transport):
    fleet = await start(tmp_path / "run")
    try:
        await join(fleet, transport)
        await round_of(fleet, "step-1")
        fleet.publish("step-2")
        with stopped(fleet.members[4].client.state.pid):
            began = time.monotonic()
            fleet.transfer("step-2", 8.0)
            others = [m for m in fleet.members if m.rank != 4]
            states = await fleet.transferred(20, RoundPhase.FAILED, others)
            assert time.monotonic() - began < 12
        assert {s.round.problem.rank for s in states} == {4}, [s.round.problem for s in states]
    finally:
        await fleet.close()


async def test_gloo_is_refused_for_weights_on_a_gpu(tmp_path):
    from weightsync_engine.protocol.messages import EpochPhase

    fleet = await start(tmp_path / "run")
    try:
        states = await fleet.join(
            30, EpochPhase.FAILED, **{f"rank_{r}": {"transport": "gloo"} for r in RANKS}
        )
        assert {s.epoch.problem.reason for s in states} == {"NoTransport"}
    finally:
        await fleet.close()


async def test_a_version_is_announced_behind_the_work_of_the_training_stream(tmp_path):
    fleet = await start(tmp_path / "run")
    try:
        await join(fleet, "nccl_p2p")
        torch.cuda._sleep(int(1.8e9))  # about a second of a training stream's own work
        fleet.publish("step-1")
        client = fleet.members[0].client
        await until(lambda: client.state.snapshot is not None, 30, "the snapshot")
        assert fleet.members[0].slab.read_stamp().version == "step-1"
        fleet.transfer("step-1")
        await fleet.transferred(40)
        fleet.check_bits()
    finally:
        await fleet.close()


def test_mover_and_spare_take_what_is_reckoned_for_them_and_give_it_back(tmp_path):
    gpu = open_device(torch.device("cuda", 0))
    slab, manifest = make(0, 1, device="cuda:0")
    before = settled(gpu)
    supervisor = MoverSupervisor(
        "trainer", 0, slab, manifest, tmp_path / "run", spare=True, staging_bytes=512 * MIB
    )
    try:
        began = time.monotonic()
        assert supervisor.wait_ready(120) == ""
        taken = before - gpu.memory()[0] - 512 * MIB
        print(f"\nmover and spare: {taken / 2 / MIB:.0f} MiB each, up after {time.monotonic() - began:.1f} s")
        assert 0 < taken <= 2 * CONTEXT_BYTES
    finally:
        supervisor.close()
    deadline = time.monotonic() + 30
    while gpu.memory()[0] < before - 64 * MIB:
        assert time.monotonic() < deadline, f"{(before - gpu.memory()[0]) / MIB:.0f} MiB did not come back"
        time.sleep(0.1)
    slab.close()


def settled(gpu) -> int:
    """Free bytes, once processes of earlier tests have given back theirs."""
    until, last, since = time.monotonic() + 60, -1, 0.0
    while time.monotonic() < until:
        free = gpu.memory()[0]
        if free != last:
            last, since = free, time.monotonic()
        elif time.monotonic() - since > 5:  # a mover leaves 2 s after its parent let go
            return free
        time.sleep(0.05)
    raise AssertionError("the GPU's memory does not come to rest")
