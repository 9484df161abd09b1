"""Real movers over slabs in device memory, on a GPU made of host memory: everything but CUDA itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from tests.fake_gpu import FakeDevice, in_place, mover_environment
from tests.integration.mover.fleet import Fleet, make, until

from weightsync_engine.mover.supervisor import MoverSupervisor
from weightsync_engine.protocol.messages import RoundPhase

MIB = 1 << 20


@pytest.fixture
def gpu():
    with in_place(FakeDevice()) as device:
        yield device


async def start(folder, **options) -> Fleet:
    return await Fleet.start(folder, device="cuda:0", env=mover_environment(), **options)


async def test_a_round_goes_through_memory_that_movers_map_by_its_handle(gpu, tmp_path):
    fleet = await start(tmp_path / "run", staging_bytes=8 * MIB)
    try:
        await fleet.join()
        for version in ("step-1", "step-2"):
            fleet.publish(version)
            gpu.run()
            fleet.transfer(version)
            await fleet.transferred()
            fleet.check_bits()
    finally:
        await fleet.close()


async def test_a_version_is_announced_only_when_the_stream_has_copied_it(gpu, tmp_path):
    fleet = await start(tmp_path / "run")
    try:
        await fleet.join()
        fleet.publish("step-1")
        client = fleet.members[0].client
        with pytest.raises(TimeoutError):
            await client.wait_for(lambda s: s is not None and s.snapshot is not None, 0.5)
        gpu.run()
        await client.wait_for(lambda s: s is not None and s.snapshot is not None, 10)
        assert client.state.snapshot.version == "step-1"
    finally:
        gpu.run()
        await fleet.close()


async def test_a_round_that_starts_before_the_copy_has_ended_waits_for_it(gpu, tmp_path):
    fleet = await start(tmp_path / "run")
    try:
        await fleet.join()
        fleet.publish("step-1")
        fleet.transfer("step-1")
        await asyncio.sleep(0.3)  # not for an outcome: the round is to begin meanwhile
        assert fleet.members[0].client.state.round.phase is RoundPhase.TRANSFERRING
        gpu.run()
        await fleet.transferred()
        fleet.check_bits()
    finally:
        gpu.run()
        await fleet.close()


async def test_a_round_whose_copy_never_ends_fails_and_names_the_rank(gpu, tmp_path):
    fleet = await start(tmp_path / "run")
    try:
        await fleet.join()
        fleet.publish("step-1")
        fleet.transfer("step-1", deadline=4.0)
        states = await fleet.transferred(20, RoundPhase.FAILED)
        assert {s.round.problem.reason for s in states} == {"VersionUnavailable"}
        assert "trainer rank 0" in states[0].round.problem.message
    finally:
        gpu.run()
        await fleet.close()


@pytest.mark.parametrize(
    ("env", "staging", "words"),
    [
        ({"FAKE_GPU": "blind"}, 0, "is not visible here"),
        ({"FAKE_GPU_TOTAL": str(4 * MIB)}, 64 * MIB, "for staging: 67108864 bytes asked for"),
    ],
    ids=["another-gpu", "no-room-for-staging"],
)
def test_why_a_mover_cannot_start_is_told_to_the_parent(gpu, tmp_path, monkeypatch, env, staging, words):
    slab, manifest = make(0, 1, device="cuda:0")
    supervisor = MoverSupervisor(
        "trainer", 0, slab, manifest, tmp_path / "run", env=mover_environment() | env, staging_bytes=staging
    )
    try:
        assert words in supervisor.wait_ready(60)
    finally:
        supervisor.close()
        slab.close()


def test_waiting_for_movers_ends_with_mover_and_spare_standing_and_is_bounded(gpu, tmp_path):
    slab, manifest = make(0, 1, device="cuda:0")
    supervisor = MoverSupervisor("trainer", 0, slab, manifest, tmp_path / "run", env=mover_environment())
    try:
        assert "was not up within 0 s" in supervisor.wait_ready(0)
        assert supervisor.wait_ready(60) == ""
        first, spare = supervisor.pid, supervisor._spare.process.pid
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while supervisor.pid != spare:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        supervisor.close()
        slab.close()


async def test_a_mover_that_is_replaced_maps_the_same_snapshot(gpu, tmp_path):
    fleet = await start(tmp_path / "run", spare=(0,))
    try:
        fleet.publish("step-1")
        gpu.run()
        member = fleet.members[0]
        state = await member.client.wait_for(lambda s: s is not None and s.snapshot is not None, 10)
        os.kill(state.pid, signal.SIGKILL)
        await fleet.new_mover(member, state.mover_id)
        await until(
            lambda: member.client.state is not None and member.client.state.snapshot, 10, "its snapshot"
        )
        await fleet.join()
        fleet.transfer("step-1")
        await fleet.transferred()
        fleet.check_bits()
    finally:
        await fleet.close()
