"""The epoch's store: on one address only, signed, and with a deadline on every wait."""

import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from weightsync_engine.protocol.messages import Problem, Rendezvous
from weightsync_engine.transport.failure import Failure, PeerFailure
from weightsync_engine.transport.store import EpochStore, connect_store, open_store

KEY = "k" * 32


@pytest.fixture(scope="module")
def server():
    return open_store("127.0.0.1")


@pytest.fixture
def ranks(server, request):
    """Stores of two ranks of an epoch of this test's own."""
    return [EpochStore(server[0], request.node.name, KEY, rank) for rank in range(2)]


def soon(seconds=0.1):
    return time.monotonic() + seconds


def test_it_listens_on_the_given_address_alone(server):
    # C54
    port = f"{server[1].port:04X}"
    listening = [
        fields[1].split(":")[0]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A" and fields[1].endswith(f":{port}")
    ]
    assert listening == ["0100007F"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "trainer-0", "224.0.0.1"])
def test_an_address_that_is_not_one_pods_own_is_refused(host):
    # C32
    with pytest.raises(ValueError, match="own"):
        open_store(host)


@pytest.mark.parametrize("size", [0, 10, 5000, 9 << 20])
def test_values_of_any_size_come_back(ranks, size):
    value = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
    ranks[0].put("v", value[:size])
    assert ranks[1].get("v", 0, soon(), "v") == value[:size]


def test_incompressible_values_above_the_stores_limit_travel_in_chunks(ranks):
    value = __import__("random").Random(1).randbytes(9 << 20)
    ranks[0].put("v", value)
    assert ranks[1].get("v", 0, soon(), "v") == value


def test_ranks_that_are_late_are_named_with_what_they_owe(ranks):
    ranks[0].put("a", b"1")
    with pytest.raises(PeerFailure, match="ranks 4, 5 did not deliver its manifest") as caught:
        ranks[1].get_all({"a": 0, "b": 4, "c": 5}, soon(), "its manifest")
    assert (caught.value.problem.reason, caught.value.problem.rank) == ("PeerLate", 4)


def test_a_value_signed_with_another_key_is_refused_and_its_writer_named(server, ranks, request):
    stranger = EpochStore(server[0], request.node.name, "x" * 32, 7)
    stranger.put("v", b"1")
    with pytest.raises(Failure, match="rank 7") as caught:
        ranks[0].get("v", 7, soon(), "v")
    assert caught.value.problem.reason == "WrongKey"


def test_a_value_cannot_be_moved_to_another_key(server, ranks, request):
    ranks[0].put("a", b"1")
    raw = PrefixStore(request.node.name, server[0])
    raw.set("b", raw.get("a"))
    with pytest.raises(Failure) as caught:
        ranks[1].get("b", 0, soon(), "b")
    assert caught.value.problem.reason == "WrongKey"


def test_a_value_by_another_rank_than_expected_is_refused(ranks):
    ranks[1].put("v", b"1")
    with pytest.raises(Failure) as caught:
        ranks[0].get("v", 0, soon(), "v")
    assert (caught.value.problem.reason, caught.value.problem.rank) == ("WrongWriter", 1)


@pytest.mark.parametrize("blob", [b"", b"\x80\x04\x95\x10pickle", b"x" * 32, b"{}" * 40])
def test_a_blob_from_a_stranger_is_refused_and_never_unpickled(server, ranks, request, blob):
    PrefixStore(request.node.name, server[0]).set("v", blob)
    with pytest.raises(Failure) as caught:
        ranks[0].get("v", 0, soon(), "v")
    assert caught.value.problem.reason == "WrongKey"


def test_the_first_of_two_claims_stands(ranks):
    assert ranks[0].put_once("claim", b"a") == b"a"
    assert ranks[1].put_once("claim", b"b") == b"a"


def test_a_reported_failure_ends_the_waits_of_its_scope_only(ranks):
    first = Problem(reason="PeerLost", message="rank 3 is gone", rank=3)
    ranks[0].scope = ranks[1].scope = "round-1"
    assert ranks[0].report(first) == first
    assert ranks[1].report(Problem(reason="Other", message="later")) == first
    started = time.monotonic()
    with pytest.raises(Failure, match="rank 3 is gone"):
        ranks[1].get("never", 0, soon(30), "v")
    assert time.monotonic() - started < 10
    ranks[1].scope = "round-2"
    assert ranks[1].reported() is None


def test_a_wait_ends_when_the_epoch_is_dropped(server):
    store = EpochStore(server[0], "dropped", KEY, 0, cancelled=lambda: True)
    with pytest.raises(Failure, match="dropped"):
        store.get("never", 1, soon(30), "v")


def test_a_store_that_nobody_serves_is_named_at_the_deadline():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Failure, match=f"127.0.0.1:{port}") as caught:
        connect_store(Rendezvous(host="127.0.0.1", port=port), soon(0.3), lambda: False)
    assert caught.value.problem.reason == "StoreUnreachable"


def test_a_store_that_is_gone_is_a_stated_problem():
    server, where = open_store("127.0.0.1")
    client = TCPStore(where.host, where.port, None, False, timedelta(seconds=5), False)
    store = EpochStore(client, "gone", KEY, 1)
    store.put("a", b"1")
    del server
    with pytest.raises(PeerFailure) as caught:
        store.get("b", 0, soon(20), "b")
    assert (caught.value.problem.reason, caught.value.problem.rank) == ("StoreLost", 0)
