"""Real mover processes: two trainers with uneven shards, two servers at tp 2, gloo, slabs, faults."""

import asyncio
import contextlib
import os
import re
import signal
import stat
import time

import pytest
import pytest_asyncio
from tests.integration.mover.fleet import TRAINERS, Fleet, stopped, until

from weightsync_engine.mover.client import MoverClient, MoverGone
from weightsync_engine.protocol.messages import EpochPhase, RoundPhase
from weightsync_engine.protocol.mover import MoverJoin, MoverLeave, MoverOutcome, MoverTransfer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

LAYERS = 30
"""Enough steps for a fault to fall in the middle of them."""
DEADLINE = 9.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_of_all(tmp_path_factory):
    outcomes = []
    fleet = await Fleet.start(
        tmp_path_factory.mktemp("movers") / "run", LAYERS, spare={3}, on_outcome=outcomes.append
    )
    fleet.outcomes = outcomes
    yield fleet
    await fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(fleet_of_all):
    """The fleet with all its movers up, and joined in a fresh epoch."""
    await asyncio.gather(*(m.client.wait_for(lambda s: s is not None, 90) for m in fleet_of_all.members))
    await fleet_of_all.join()
    return fleet_of_all


async def test_every_bit_arrives_also_of_a_second_version_in_the_same_epoch(fleet):
    for version in ("step-1", "step-2"):
        fleet.publish(version)
        fleet.transfer(version)
        states = await fleet.transferred()
        fleet.check_bits()
        for member, state in zip(fleet.members, states, strict=True):
            assert state.round.step == state.round.steps > 0
            assert state.round.bytes_done == state.round.bytes_total > 0
            assert member.slab.read_stamp().version == version
    assert len({s.epoch.plan.digest for s in states}) == 1
    assert states[0].snapshot.version == "step-2" and states[2].snapshot is None


async def test_rank_0_says_in_one_word_whether_a_version_brings_other_weights(fleet):
    # C14
    told = []
    for version, seed in (("step-a", 100), ("step-b", 100), ("step-c", 101)):
        fleet.publish(version, fleet.sequence + 1, seed)
        fleet.transfer(version)
        first, *others = await fleet.transferred()
        assert {state.round.content for state in others} == {""}
        told.append(first.round.content)
    assert len(told[0]) == 32 and told[0] == told[1] != told[2]


async def test_repeated_and_older_requests_change_nothing(fleet):
    fleet.publish("step-3")
    fleet.transfer("step-3")
    await fleet.transferred()
    member = fleet.members[4]
    before = member.client.state
    fleet.round -= 1
    fleet.transfer("step-3")
    old = {**FIELDS, "epoch": fleet.epoch - 1, "rank": 4}
    member.client.send(MoverJoin(**old))
    member.client.send(MoverLeave(epoch=fleet.epoch - 1))
    # Requests are taken in order: an answer to this one shows that the others have been looked at.
    fleet.members[0].client.send(MoverOutcome(version="step-3", committed=True))
    await until(
        lambda: any(o.version == "step-3" for o in fleet.outcomes), 20, "the outcome reaches the trainer"
    )
    assert member.client.state == before


FIELDS = {
    "object_uid": "uid", "term": 1, "rank": 0, "key": "k" * 32, "host": "127.0.0.1", "world_size": 6,
    "trainer_ranks": TRAINERS, "rendezvous": {"host": "127.0.0.1", "port": 1}, "transport": "auto", "server":
    "s", "deadline_seconds": 1,
}  # fmt: skip


async def mid_transfer(fleet, version):
    """Start a transfer and return when rank 0 is inside its steps."""
    fleet.publish(version)
    fleet.transfer(version, DEADLINE)
    state = await fleet.members[0].client.wait_for(
        lambda s: s is not None and s.round is not None and s.round.round == fleet.round and s.round.step > 0,
        20,
    )
    assert state.round.phase == RoundPhase.TRANSFERRING


@pytest.mark.parametrize("victim", [3, 1])
async def test_a_mover_killed_in_the_middle_is_named_by_all_survivors_and_a_new_epoch_works(fleet, victim):
    await mid_transfer(fleet, f"killed-{victim}")
    member = fleet.members[victim]
    old = member.client.state.mover_id
    assert member.client.kill()
    started = time.monotonic()
    survivors = [m for m in fleet.members if m is not member]
    states = await fleet.transferred(DEADLINE + 3, RoundPhase.FAILED, survivors)
    assert time.monotonic() - started < DEADLINE + 1
    assert {s.round.problem.rank for s in states} == {victim}
    assert all(s.epoch.phase == EpochPhase.FAILED and not s.epoch.reusable for s in states)
    assert all(m.slab.read_stamp() is None for m in survivors if m.rank >= TRAINERS)
    await fleet.new_mover(member, old)
    assert member.client.lost.state.mover_id == old
    assert "signal 9" in member.supervisor.problem.message
    await fleet.join()
    fleet.transfer(f"killed-{victim}")
    await fleet.transferred()
    fleet.check_bits()


@pytest.mark.parametrize("victim", [4, 0])
async def test_a_mover_frozen_in_the_middle_is_named_by_all_others_and_may_join_again_when_thawed(
    fleet, victim
):
    await mid_transfer(fleet, f"frozen-{victim}")
    member = fleet.members[victim]
    with stopped(member.client.state.pid):
        others = [m for m in fleet.members if m is not member]
        states = await fleet.transferred(DEADLINE + 3, RoundPhase.FAILED, others)
        assert {s.round.problem.rank for s in states} == {victim}
        assert {s.round.problem.reason for s in states} == {"PeerLate"}
        (message,) = {s.round.problem.message for s in states}
        named = rf"rank {victim} \(pod {member.server}, worker {victim}\)"
        late = r" has (not started|moved nothing of) step \d+ of \d+ for \d\.\d s"
        # The rank that tells first may have been held up by one that itself waited for the victim.
        assert re.search(rf"{named}{late}|{late}.*; rank \d itself waited for {named}$", message), message
    await fleet.transferred(DEADLINE + 10, RoundPhase.FAILED, [member])
    await fleet.join()
    fleet.transfer(f"frozen-{victim}")
    await fleet.transferred()
    fleet.check_bits()


async def test_movers_that_waited_in_vain_for_a_frozen_one_join_the_next_epoch_as_they_are(fleet):
    victim = fleet.members[4]
    others = [m for m in fleet.members if m is not victim]
    movers = [m.client.state.mover_id for m in fleet.members]
    with stopped(victim.client.state.pid):
        with pytest.raises(TimeoutError):
            await fleet.join(3.0, EpochPhase.FAILED)
        for member in others:
            epoch = member.client.state.epoch
            assert (epoch.phase, epoch.reusable, epoch.problem.rank) == (EpochPhase.FAILED, True, 4)
    states = await fleet.join()
    assert [s.mover_id for s in states] == movers
    assert not any(s.epoch.reusable for s in states)
    fleet.publish("again")
    fleet.transfer("again")
    await fleet.transferred()
    fleet.check_bits()


async def test_a_frozen_mover_can_be_killed_by_its_driver_and_never_blocks_its_parent(fleet):
    member = fleet.members[3]
    old = member.client.state.mover_id
    with stopped(member.client.state.pid):
        started = time.monotonic()
        for _ in range(20_000):
            member.supervisor.published()
        assert time.monotonic() - started < 5
        assert member.client.kill()
        await fleet.new_mover(member, old)
    with pytest.raises(TimeoutError, match="did not get there"):
        await member.client.wait_for(lambda s: s is None, 0.01)


async def test_a_new_join_replaces_one_that_still_waits(fleet):
    member = fleet.members[2]
    fleet.epoch += 1
    unreachable = {**FIELDS, "epoch": fleet.epoch, "rank": 2, "deadline_seconds": 600}
    member.client.send(MoverJoin(**unreachable))
    await member.client.wait_for(lambda s: s.epoch is not None and s.epoch.epoch == fleet.epoch, 10)
    await fleet.join()


async def test_a_leave_forgets_the_epoch_and_a_transfer_without_one_fails_with_words(fleet):
    member = fleet.members[5]
    member.client.send(MoverLeave(epoch=fleet.epoch))
    await member.client.wait_for(lambda s: s.epoch is None, 10)
    fleet.publish("left")
    fleet.round += 1
    member.client.send(transfer_request(fleet, "left"))
    state = await member.client.wait_for(fleet.ended, 10)
    assert state.round.problem.reason == "NotJoined" and "no epoch" in state.round.problem.message


def transfer_request(fleet, version):
    return MoverTransfer(epoch=fleet.epoch, round=fleet.round, version=version, deadline_seconds=5)


async def test_the_socket_is_the_users_own_and_a_malformed_line_costs_only_that_connection(fleet):
    path = fleet.members[5].supervisor.socket_path
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for line in (b"\x80\x04pickle\n", b'{"op": "join"}\n', b"{}\n", b"x" * (2 << 20) + b"\n"):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line)
        assert b"mover_id" in await asyncio.wait_for(reader.readline(), 20)
        with contextlib.suppress(ConnectionResetError):  # what it had not read when it hung up
            await asyncio.wait_for(reader.read(), 20)
        writer.close()
    assert fleet.members[5].client.state.pid == fleet.members[5].supervisor.pid


async def test_several_drivers_see_the_same_state(fleet):
    member = fleet.members[1]
    async with MoverClient(member.supervisor.socket_path) as second:
        state = await second.wait_for(lambda s: s is not None, 20)
        assert state.mover_id == member.client.state.mover_id
        fleet.publish("seen-by-both")
        for client in (second, member.client):
            await client.wait_for(lambda s: s.snapshot.version == "seen-by-both", 20)
    with pytest.raises(MoverGone):
        second.send(MoverLeave(epoch=1))


async def test_close_lets_the_mover_leave_by_itself_neither_killed_nor_reaped(fleet):
    """Last: the fleet is one short afterwards."""
    member = fleet.members[5]
    pid = member.client.state.pid
    child = member.supervisor._active.process
    started = time.monotonic()
    member.supervisor.close()
    assert time.monotonic() - started < 1.5
    await until(lambda: member.client.state is None, 20, "the mover leaves")
    assert time.monotonic() - started > 1.0
    assert child.poll() == 0  # what the supervisor wrote there; the process itself was left alone
    done, status = 0, 0

    def ended():
        nonlocal done, status
        done, status = os.waitpid(pid, os.WNOHANG)
        return done == pid

    await until(ended, 20, "the mover is a zombie that nobody reaped")
    assert os.waitstatus_to_exitcode(status) == 0 != -signal.SIGKILL
    assert not member.supervisor.socket_path.exists()
