"""Epochs over a real store and real gloo, with all ranks as threads here: what goes wrong is told to every
rank alike."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.integration.mover.fleet import HOST, KEY, SERVERS, TP, TRAINERS, make

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.mover import epoch as epoch_module
from weightsync_engine.mover.epoch import Epoch
from weightsync_engine.mover.slab import Slab
from weightsync_engine.plan.validate import Envelope
from weightsync_engine.protocol.messages import Rendezvous
from weightsync_engine.protocol.mover import MoverJoin, MoverTransfer
from weightsync_engine.protocol.names import ENV_STEP_BYTES
from weightsync_engine.transport.failure import Failure
from weightsync_engine.transport.gloo import GlooTransport
from weightsync_engine.transport.store import EpochStore, open_store

WORLD = TRAINERS + SERVERS * TP


class World:
    """All ranks of an epoch. `changed` gives per rank what makes it differ; `requests` overrides its join."""

    def __init__(self, changed=None, requests=None, deadline=15.0, kind=Epoch, ranks=None):
        self.store, self.rendezvous = open_store(HOST)
        self.epochs: dict[int, Epoch] = {}
        self.slabs: dict[int, Slab] = {}
        self.manifests = {}
        for rank in ranks if ranks is not None else range(WORLD):
            self.slabs[rank], self.manifests[rank] = make(rank, 1, **(changed or {}).get(rank, {}))
            server = "trainer" if rank < TRAINERS else f"server-{(rank - TRAINERS) // TP}"
            fields = {
                "object_uid": "uid", "term": 1, "epoch": 1, "rank": rank, "key": KEY, "host": HOST,
                "world_size": WORLD, "trainer_ranks": TRAINERS, "rendezvous": self.rendezvous, "transport":
                "auto", "server": server, "deadline_seconds": deadline,
            }  # fmt: skip
            request = MoverJoin(**{**fields, **(requests or {}).get(rank, {})})
            self.epochs[rank] = kind(request, self.manifests[rank], self.slabs[rank])

    def all(self, do):
        """Per rank what `do(epoch)` returned, or the problem it raised; all ranks at once."""

        def one(epoch):
            try:
                return do(epoch)
            except Failure as e:
                return e.problem

        with ThreadPoolExecutor(WORLD) as pool:
            return dict(zip(self.epochs, pool.map(one, self.epochs.values()), strict=True))

    def join(self):
        return self.all(lambda e: e.join())

    def publish(self, version, seed=1, sequences=(1, 1)):
        generator = torch.Generator().manual_seed(seed)
        values = {}
        for rank in range(TRAINERS):
            self.slabs[rank].begin_write()
            for source in self.manifests[rank].sources:
                if source.name not in values:
                    values[source.name] = torch.randn(source.shape, generator=generator).bfloat16()
                box = shard_boxes(source)[rank]
                if box is not None:
                    self.tensor(rank, source.name).copy_(
                        values[source.name][tuple(map(slice, box.start, box.stop))]
                    )
            self.slabs[rank].stamp(version, sequences[rank])
        return values

    def tensor(self, rank, name):
        return self.slabs[rank].tensor(self.manifests[rank].tensors[name])

    def transfer(self, version, number=1, deadline=15.0):
        request = MoverTransfer(epoch=1, round=number, version=version, deadline_seconds=deadline)
        return self.all(lambda e: e.transfer(request, lambda **now: None))

    def close(self):
        for epoch in self.epochs.values():
            epoch.close()


@pytest.fixture
def world():
    with contextlib.ExitStack() as stack:

        def make_world(*args, **kwargs):
            made = World(*args, **kwargs)
            stack.callback(made.close)
            return made

        yield make_world


def the_one_problem(results):
    """The problem, which must be the same on every rank."""
    assert len({p.model_dump_json() for p in results.values()}) == 1, results
    return results[0]


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        ({"dtype": "float32"}, "DtypeDiffers", ["'norm'", "bfloat16", "float32"]),
        ({"rows": 3}, "ShapeDiffers", ["'norm'", "(16,)", "(19,)"]),
        ({"rename": "final_norm"}, "NotSent", ["'final_norm'"]),
    ],
)
def test_a_worker_whose_model_differs_is_named_on_all_ranks_before_anything_moves(
    world, changed, reason, words
):
    problem = the_one_problem(world(changed={4: changed, 5: changed}).join())
    assert (problem.reason, problem.rank) == (reason, 4)
    assert all(w in problem.message for w in words)


def test_a_trainer_rank_that_sees_other_parameters_than_rank_0_is_named(world):
    problem = the_one_problem(world(changed={1: {"dtype": "float32"}}).join())
    assert (problem.reason, problem.rank) == ("SourcesDiffer", 1)


def test_ranks_with_unlike_shares_look_for_each_other_at_the_same_steps(world, monkeypatch):
    # Two trainers send a worker a whole each time: by what each has moved itself they would look at unlike steps, and
    # wait for each other for ever.
    monkeypatch.setenv(ENV_STEP_BYTES, "64")
    monkeypatch.setattr(GlooTransport, "check_bytes", 4 * 64)
    made = world()
    plans = made.join()
    assert plans[0].steps > 20
    made.publish("step-1")
    assert set(made.transfer("step-1").values()) == {None}


def test_a_rank_with_another_key_is_refused_by_all(world):
    results = world(requests={5: {"key": "x" * 32}}, deadline=6).join()
    assert {p.reason for p in results.values()} == {"WrongKey"}
    assert all(results[r].rank == 5 for r in range(5)) and "rank 5" in results[5].message


def test_a_second_process_that_claims_a_rank_is_refused(world):
    # C54
    w = world()
    store = EpochStore(w.store, "weightsync/uid/1/1", KEY, 3)
    store.put_once("claim/3", b"somebody else")
    problem = the_one_problem(w.join())
    assert (problem.reason, problem.rank) == ("RankTaken", 3)


def test_a_rank_that_never_joins_is_named_at_the_deadline(world):
    started = time.monotonic()
    problem = the_one_problem(world(ranks=[0, 1, 2, 4, 5], deadline=2).join())
    assert (problem.reason, problem.rank) == ("PeerLate", 3)
    assert time.monotonic() - started < 10


def test_a_lead_that_never_joins_is_named_at_the_deadline(world):
    w = world(ranks=[1, 2, 3], deadline=2)
    assert {(p.reason, p.rank) for p in w.join().values()} == {("PeerLate", 0)}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"trainer_ranks": 1}, "WrongRole"),
        ({"world_size": 2}, "WorldSize"),
        ({"transport": "nccl_m2n"}, "NoTransport"),
        ({"rank": 0}, "WrongRank"),
        ({"rendezvous": Rendezvous(host=HOST, port=1), "deadline_seconds": 0.5}, "StoreUnreachable"),
    ],
)
def test_a_request_that_cannot_be_right_is_refused_by_the_rank_itself(world, request_, reason):
    (problem,) = world(requests={1: request_}, ranks=[1], deadline=1).join().values()
    assert problem.reason == reason


def test_a_rank_whose_plan_differs_is_named(world, monkeypatch):
    # C11
    w = world()
    compile_plan = epoch_module.compile_plan

    def differing(sources, workers, trainers, limits):
        limits = Envelope(max_targets=1) if threading.get_ident() == other else limits
        return compile_plan(sources, workers, trainers, limits)

    other = None
    monkeypatch.setattr(epoch_module, "compile_plan", differing)
    join = w.epochs[2].join

    def join_as_other():
        nonlocal other
        other = threading.get_ident()
        return join()

    monkeypatch.setattr(w.epochs[2], "join", join_as_other)
    problem = the_one_problem(w.join())
    assert (problem.reason, problem.rank) == ("PlanDiffers", 2)


def test_ranks_with_unlike_runtimes_are_refused(world, monkeypatch):
    # C34
    w = world()
    monkeypatch.setattr(w.epochs[3], "_runtime", lambda: {**Epoch._runtime(w.epochs[3]), "torch": "1.0"})
    problem = the_one_problem(w.join())
    assert (problem.reason, problem.rank) == ("RuntimeDiffers", 3) and "1.0" in problem.message


def test_a_version_that_a_snapshot_does_not_hold_is_named_and_the_epoch_stays_good(world):
    w = world()
    w.join()
    w.publish("step-1")
    problem = the_one_problem(w.transfer("step-2"))
    assert (problem.reason, problem.rank) == ("VersionUnavailable", 0)
    assert all(e.usable for e in w.epochs.values())
    assert set(w.transfer("step-1", number=2).values()) == {None}
    assert w.slabs[4].read_stamp().version == "step-1"


def test_trainer_ranks_in_unlike_publishes_are_refused(world):
    w = world()
    w.join()
    w.publish("step-1", sequences=(4, 5))
    problem = the_one_problem(w.transfer("step-1"))
    assert (problem.reason, problem.rank) == ("VersionUnavailable", 1)


class Flips(Epoch):
    """Flips one bit of what has arrived on rank 4, behind the steps and before the digests, in round 1."""

    def _run_steps(self, scope, *args):
        whole = super()._run_steps(scope, *args)
        if self.rank == 4 and scope == "round-1":
            self._slab.tensor(self._manifest.tensors["0.qkv"]).view(torch.int16)[17, 3] ^= 1
        return whole


def test_one_flipped_bit_fails_the_round_on_all_ranks_and_the_next_round_mends_it(world):
    w = world(kind=Flips)
    w.join()
    values = w.publish("step-1")
    problem = the_one_problem(w.transfer("step-1"))
    assert (problem.reason, problem.rank) == ("DigestMismatch", 4)
    assert "'0.k'" in problem.message and "server-1" in problem.message
    assert all(w.slabs[r].read_stamp() is None for r in range(TRAINERS, WORLD))
    assert set(w.transfer("step-1", number=2).values()) == {None}
    piece = next(p for p in w.manifests[4].pieces if p.name == "0.k")
    got = w.tensor(4, "0.qkv")[tuple(map(slice, piece.at, Box(piece.at, piece.box.shape).stop))]
    assert torch.equal(got, values["0.k"])


class Republishes(Epoch):
    def _run_steps(self, scope, stall, deadline, stamp, progress):
        def moved(**now):
            if self.rank == 1:
                self._slab.begin_write()
                self._slab.stamp("step-2", 2)
            progress(**now)

        return super()._run_steps(scope, stall, deadline, stamp, moved)


def test_a_snapshot_that_is_overwritten_while_it_travels_fails_the_round(world):
    w = world(kind=Republishes)
    w.join()
    w.publish("step-1")
    problem = the_one_problem(w.transfer("step-1"))
    assert (problem.reason, problem.rank) == ("SnapshotChanged", 1)
    assert all(w.slabs[r].read_stamp() is None for r in range(TRAINERS, WORLD))


class Raises(Epoch):
    def _run_steps(self, *args):
        if self.rank == 3:
            raise ZeroDivisionError("a defect")
        return super()._run_steps(*args)


def test_no_rank_begins_a_step_until_the_last_one_has_its_go(world, monkeypatch):
    # C39
    last, begun, ready = WORLD - 1, [], threading.Semaphore(0)
    put, begin = EpochStore.put, GlooTransport.begin

    def told(self, key, value):
        put(self, key, value)
        if "/ready" in key:
            ready.release()

    def begins(self, *args):
        begun.append(args)
        return begin(self, *args)

    class Waits(Epoch):
        def transfer(self, *args):
            if self.rank == last:
                assert all(ready.acquire(timeout=10) for _ in range(WORLD - 1))
                seen.extend(begun)
            return super().transfer(*args)

    seen = []
    w = world(kind=Waits)
    w.join()
    w.publish("step-1")
    monkeypatch.setattr(EpochStore, "put", told)
    monkeypatch.setattr(GlooTransport, "begin", begins)
    assert set(w.transfer("step-1").values()) == {None}
    assert seen == [] and begun


def test_a_defect_in_one_rank_fails_the_round_on_all_and_names_it(world):
    w = world(kind=Raises)
    w.join()
    w.publish("step-1")
    problem = the_one_problem(w.transfer("step-1", deadline=6))
    assert (problem.reason, problem.rank) == ("MoverError", 3) and "a defect" in problem.message
    assert not any(e.usable for e in w.epochs.values())


def test_epochs_that_come_and_go_leave_no_threads_or_sockets_behind(world):
    # C35
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once():
        w = World()
        assert all(not hasattr(p, "reason") for p in w.join().values())
        w.close()
        for slab in w.slabs.values():
            slab.close()

    once()
    before = count()
    for _ in range(5):
        once()
    deadline = time.monotonic() + 10
    while any(now > then + 2 for now, then in zip(count(), before, strict=True)):
        assert time.monotonic() < deadline, (before, count())
        time.sleep(0.05)


@pytest.mark.parametrize("given", ["many", "0", "-1", "99999999999"])
def test_a_step_size_that_cannot_be_is_refused_with_the_setting_and_its_range(world, monkeypatch, given):
    monkeypatch.setenv(ENV_STEP_BYTES, given)
    problem = the_one_problem(world(ranks=[0], deadline=1).join())
    assert problem.reason == "BadSetting" and ENV_STEP_BYTES in problem.message and given in problem.message


def test_a_small_step_size_makes_many_steps_and_the_same_weights(world, monkeypatch):
    monkeypatch.setenv(ENV_STEP_BYTES, "64")
    w = world()
    summaries = w.join()
    assert len({s.digest for s in summaries.values()}) == 1 and summaries[0].steps > 20
    w.publish("step-1")
    assert set(w.transfer("step-1").values()) == {None}
