"""Presence: peers one step ahead are not waited for, and the rank that holds all others up is named."""

import contextlib
import itertools
import threading
import time

import pytest

from weightsync_engine.protocol.messages import Problem
from weightsync_engine.transport.failure import Failure, PeerFailure
from weightsync_engine.transport.presence import Presence
from weightsync_engine.transport.store import EpochStore, open_store

numbers = itertools.count()


@pytest.fixture(scope="module")
def server():
    return open_store("127.0.0.1")[0]


@pytest.fixture
def stores(server):
    prefix = f"presence-{next(numbers)}"
    return [EpochStore(server, prefix, "k" * 32, rank) for rank in range(3)]


def test_a_peer_in_its_step_before_counts_as_present(stores):
    a, b = Presence(stores[0], "r", [0, 1]), Presence(stores[1], "r", [0, 1])
    a.enter(0, [1], 5)  # b is about to enter step 0 and need not have entered it
    b.enter(0, [0], 5)
    a.enter(1, [1], 5)
    b.enter(1, [0], 5)


def test_a_peer_that_stays_behind_is_named(stores):
    a, _ = Presence(stores[0], "r", [0, 1]), Presence(stores[1], "r", [0, 1])
    a.enter(0, [1], 5)
    with pytest.raises(PeerFailure, match=r"rank 1 has not started step 1 for 0\.2 s") as caught:
        a.enter(1, [1], 0.2)
    assert (caught.value.problem.reason, caught.value.problem.rank) == ("PeerLate", 1)


def test_a_late_peer_is_told_by_rank_pod_step_and_time(stores):
    stores[1].introduce("pod vllm-1, worker 1")
    stores[0].steps = 399
    a, _ = Presence(stores[0], "r", [0, 131]), Presence(stores[1], "r", [0, 131])
    a.enter(0, [1], 5)
    with pytest.raises(PeerFailure) as caught:
        a.enter(1, [1], 0.2)
    assert caught.value.problem.message.startswith(
        "rank 1 (pod vllm-1, worker 1) has not started step 1 of 399 for 0.2 s: its mover is frozen"
    )


def test_a_peer_that_never_says_a_word_is_named(stores):
    a = Presence(stores[0], "r", [0])
    with pytest.raises(PeerFailure) as caught:
        a.enter(0, [2], 0.2)
    assert caught.value.problem.rank == 2


def test_the_rank_that_the_late_peer_itself_waits_for_is_named(stores):
    # 0 waits for 1 at step 2, which waits for 2 at step 1: 2 is to blame.
    a = Presence(stores[0], "r", [0, 2])
    b = Presence(stores[1], "r", [0, 1, 2])
    Presence(stores[2], "r", [0, 1])
    a.enter(0, [1], 5)
    b.enter(0, [0, 2], 5)

    def wait_for_2():
        with contextlib.suppress(PeerFailure):
            b.enter(1, [2], 1)

    waiting = threading.Thread(target=wait_for_2)
    waiting.start()
    deadline = time.monotonic() + 5
    while b'"waits_for": 2' not in stores[0].get("at/r/1", 1, deadline, "position"):
        assert time.monotonic() < deadline
    with pytest.raises(PeerFailure, match="rank 2 has not started step 1 for") as caught:
        a.enter(1, [1], 0.1)
    assert caught.value.problem.rank == 2
    waiting.join(10)


def test_who_waits_for_a_rank_that_never_said_a_word_is_not_blamed(stores):
    # Found in the cluster: 2 froze before its first word, 0 waited for it, and 1 inside an exchange with 0 blamed 0.
    a, b = Presence(stores[0], "r", [0]), Presence(stores[1], "r", [0])

    def wait_for_2():
        with contextlib.suppress(PeerFailure):
            a.enter(0, [1, 2], 2)

    waiting = threading.Thread(target=wait_for_2)
    waiting.start()
    b.enter(0, [0], 5)
    verdict = b.judge(0, PeerFailure("PeerLate", "rank 0 has moved nothing", 0)).problem
    assert verdict.rank == 2
    waiting.join(10)


def test_a_failure_that_a_rank_reports_ends_the_wait(stores):
    a, _ = Presence(stores[0], "r", [0, 1]), Presence(stores[1], "r", [0])
    stores[2].report(Problem(reason="PeerLost", message="rank 1 died", rank=1))
    Presence(stores[1], "r", [-5])
    with pytest.raises(Failure, match="rank 1 died"):
        a.enter(0, [1], 30)


def test_of_ranks_that_give_up_at_once_each_names_the_one_at_the_end_of_the_chain(stores):
    # Inside an exchange 0 waits for 1, and 1 for 2, which is frozen; both give up in the same moment.
    a, b = Presence(stores[0], "r", [0]), Presence(stores[1], "r", [0])
    Presence(stores[2], "r", [0])
    found = {}

    def give_up(rank, presence, peer):
        found[rank] = presence.judge(
            0, PeerFailure("PeerLate", f"rank {peer} moved nothing", peer)
        ).problem.rank

    threads = [threading.Thread(target=give_up, args=args) for args in ((0, a, 1), (1, b, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: 2, 1: 2}


def test_a_peer_that_broke_the_connection_because_of_a_third_rank_is_not_blamed(stores):
    a, b = Presence(stores[0], "r", [0]), Presence(stores[1], "r", [0])
    b.judge(0, PeerFailure("PeerLate", "rank 2 moved nothing", 2))
    verdict = a.judge(0, PeerFailure("PeerLost", "the connection to rank 1 broke", 1)).problem
    assert verdict.rank == 2 and "rank 1 itself waited for rank 2" in verdict.message
