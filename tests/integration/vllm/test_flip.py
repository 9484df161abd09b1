"""What becomes of running requests, of the prefix cache and of the other pods at a flip: two real vLLM servers, clients
that stream from them, and a real trainer's agent and movers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.vllm import tiny
from tests.integration.vllm.fleet import Fleet, switch, together
from tests.integration.vllm.serving import Operator, Stream, VllmProcess, streaming

from weightsync_engine.protocol.messages import AgentState, RoundPhase

pytestmark = pytest.mark.timeout(1800)

LONG = 1900
"""Tokens of a request that does not end by itself before its client stops it."""
SLOW: dict[str, str | None] = {"VLLM_LIVE_WEIGHTS_STEP_SECONDS": "0.02"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flip")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=False, kv_heads=1) for i in range(2)]


@pytest.fixture(scope="module")
def references(checkpoints: list[Path]) -> list[tiny.Reference]:
    return [tiny.Reference(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def made(folder: Path, checkpoints: list[Path]) -> Iterator[Fleet]:
    operator = Operator(folder / "operator")
    servers = [
        VllmProcess(
            checkpoints[0], folder / name, operator, arguments=("--max-model-len", "2048"), environment=SLOW
        )
        for name in ("pod-a", "pod-b")
    ]
    with together(folder, operator, checkpoints[0], servers) as fleet:
        yield fleet


@pytest.fixture
def fleet(made: Fleet, checkpoints: list[Path]) -> Fleet:
    """In sync with the first checkpoint, its cache empty of anything else."""
    made.sync(checkpoints[0], f"first-{made.round}")
    return made


def verified(fleet: Fleet, checkpoint: Path, version: str, **flip: str) -> str:
    """The round stands just before its decision."""
    version = f"{version}-{fleet.round}"
    fleet.trainer.publish(checkpoint, version)
    fleet.prepare(version, **flip)
    fleet.transfer()
    return version


def requests(fleet: Fleet, tokens: int = LONG) -> list[Stream]:
    """Two to each server."""
    streams = streaming(
        [(s, [*tiny.PROMPT, 10 * i + j]) for i, s in enumerate(fleet.servers) for j in (1, 2)], tokens
    )
    ended = [stream.server.url for stream in streams if stream.finished]
    assert not ended, f"requests to {ended} ended before the others had begun: ask for more tokens"
    return streams


def whole(streams: list[Stream], tokens: int = LONG, finished: str = "length") -> None:
    for stream in streams:
        stream.join(300)
        assert (stream.error, stream.finished) == ("", finished)
        assert len(stream.tokens) == tokens or finished == "abort"


def stopped(streams: list[Stream], more: int = 30) -> None:
    """By their clients, once each has gone on for some tokens; not one has ended or failed by itself."""
    count = [len(stream.tokens) for stream in streams]
    deadline = time.monotonic() + 60
    while any(len(s.tokens) < n + more for s, n in zip(streams, count, strict=True)):
        assert not [s.error for s in streams if s.error]
        assert time.monotonic() < deadline, "a request does not go on"
        time.sleep(0.01)
    for stream in streams:
        stream.enough.set()
        stream.join(60)
        assert (stream.error, stream.finished) == ("", "")


def apart(streams: list[Stream], old: tiny.Reference, new: tiny.Reference) -> float:
    """Seconds between the last token of the old version, wherever, and the first of the new one."""
    at = [switch(stream.tokens, stream.prompt, old, new) for stream in streams]
    assert all(0 < k < len(s.tokens) for k, s in zip(at, streams, strict=True)), f"{at}: not across the flip"
    last = max(s.times[k - 1] for k, s in zip(at, streams, strict=True))
    return min(s.times[k] for k, s in zip(at, streams, strict=True)) - last


def paused(server: VllmProcess) -> int:
    """How often its scheduler has begun to let nothing new in, by its own log."""
    return server.log.read_text(errors="replace").count("setting pause state to PAUSED_NEW")


def state(fleet: Fleet, index: int = 0) -> AgentState:
    return fleet.operator.state(fleet.servers[index].url)


# ---- the barrier -------------------------------------------------------------------------------------------


def test_with_a_barrier_no_server_makes_a_token_of_the_old_version_once_another_makes_one_of_the_new(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "barrier")
    streams = requests(fleet)
    fleet.halt()
    halted = time.monotonic()
    assert not [t for stream in streams for t in stream.times if t > halted + 0.2], (
        "a halted server generates"
    )
    # One flips long before the other; the first one's clients are the first to hear of the new version.
    one, two = fleet.servers
    for server in (one, two):
        boot = fleet.boot(server.url)
        body = {"epoch": fleet.epoch, "round": fleet.round, "version": version, "deadline_seconds": 30}
        fleet.operator.tell(server.url, "commit", boot, **body)
        told, deadline = time.monotonic(), time.monotonic() + 60
        while server is one and not any(t > told for s in streams if s.server is one for t in s.times):
            assert time.monotonic() < deadline, "the first server does not go on after its flip"
            time.sleep(0.01)
    fleet.commit(version)
    fleet.admit(version)
    stopped(streams)
    gap = apart(streams, references[0], references[1])
    print(f"the new version begins {gap * 1e3:.0f} ms after the end of the old one")
    assert gap > 0


def test_without_a_barrier_the_same_clients_see_both_versions_at_once(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "rolling")
    streams = requests(fleet)
    one, two = fleet.servers
    body = {"epoch": fleet.epoch, "round": fleet.round, "version": version, "deadline_seconds": 30}
    fleet.operator.tell(one.url, "commit", fleet.boot(one.url), **body)
    count = [len(s.tokens) for s in streams]
    deadline = time.monotonic() + 60
    while any(len(s.tokens) < n + 20 for s, n in zip(streams, count, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fleet.operator.tell(two.url, "commit", fleet.boot(two.url), **body)
    fleet.commit(version)
    fleet.admit(version)
    stopped(streams)
    assert apart(streams, references[0], references[1]) < 0, "what the test above measures would not show it"


def test_a_round_that_is_aborted_while_servers_stand_still_costs_no_token(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    verified(fleet, checkpoints[1], "given-up")
    streams = requests(fleet)
    fleet.halt()
    fleet.abort()
    stopped(streams)
    assert [s.tokens for s in streams] == [references[0].greedy(s.prompt, len(s.tokens)) for s in streams]


def test_a_halted_server_that_hears_nothing_closes_ends_its_requests_and_does_not_stay_paused(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "unheard")
    streams = requests(fleet)
    fleet.halt(seconds=3)
    for server in fleet.servers:
        fleet.operator.until(
            server.url, lambda s: s.inference is not None and not s.inference.serving, 30, "closed by itself"
        )
    whole(streams, finished="abort")
    for stream in streams:
        assert stream.tokens == references[0].greedy(stream.prompt, len(stream.tokens))
    assert fleet.servers[0].complete(tiny.PROMPT, 1).status_code == 503
    # The word may still come, and nothing is in its way.
    fleet.commit(version)
    fleet.admit(version)
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)


def test_a_server_beside_the_round_ends_its_requests_and_opens_when_the_round_is_over(
    fleet: Fleet, references: list[tiny.Reference]
) -> None:
    version = state(fleet).inference.live_version  # type: ignore[union-attr]
    fleet.round += 1  # of which nobody here is a member
    streams = requests(fleet)
    fleet.halt(fleet.servers[0])
    whole(streams[:2], finished="abort")
    assert fleet.servers[0].complete(tiny.PROMPT, 1).status_code == 503
    late = {"version": version, "after": fleet.round - 1}
    answer = fleet.operator.post(fleet.servers[0].url, "admit", fleet.boot(fleet.servers[0].url), **late)
    assert (answer.status_code, answer.json()["reason"]) == (409, "Halted")
    fleet.admit(version)
    assert fleet.servers[0].greedy(tiny.PROMPT, 16) == references[0].greedy(tiny.PROMPT, 16)
    stopped(streams[2:])


# ---- requests ----------------------------------------------------------------------------------------------


def test_wait_lets_running_requests_end_and_answers_new_ones_with_the_new_version(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "wait", requests="wait")
    streams = requests(fleet, 150)
    pauses = [paused(server) for server in fleet.servers]
    fleet.tell("commit", epoch=fleet.epoch, round=fleet.round, version=version, deadline_seconds=60)
    deadline = time.monotonic() + 30
    while any(paused(server) == before for server, before in zip(fleet.servers, pauses, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    late = [Stream(server, [*tiny.PROMPT, 77], 32) for server in fleet.servers]
    for stream in late:
        stream.start()
    fleet.commit(version)
    fleet.admit(version)
    whole(streams, 150)
    whole(late, 32)
    assert [s.tokens for s in streams] == [references[0].greedy(s.prompt, 150) for s in streams]
    assert [s.tokens for s in late] == [references[1].greedy(s.prompt, 32) for s in late]


def test_wait_for_requests_that_do_not_end_fails_in_time_and_the_old_version_goes_on(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "wait-in-vain", requests="wait")
    streams = requests(fleet)
    started = time.monotonic()
    fleet.tell("commit", epoch=fleet.epoch, round=fleet.round, version=version, deadline_seconds=0.6)
    for index in range(2):
        said = fleet.operator.until(
            fleet.servers[index].url,
            lambda s: s.round is not None and s.round.problem is not None,
            30,
            "the flip gives up",
        )
        assert said.round is not None and said.round.problem is not None and said.inference is not None
        assert said.round.problem.reason == "RequestsRunning", said.round.problem
        assert "Wait" in said.round.problem.message
        assert said.inference.live_version != version
    print(f"given up after {time.monotonic() - started:.2f} s")
    stopped(streams)
    assert [s.tokens for s in streams] == [references[0].greedy(s.prompt, len(s.tokens)) for s in streams]
    # Nothing runs any more: the same decision is carried out now.
    fleet.tell("commit", epoch=fleet.epoch, round=fleet.round, version=version, deadline_seconds=30)
    for server in fleet.servers:
        fleet.operator.until(
            server.url,
            lambda s: s.round is not None and s.round.phase is RoundPhase.COMMITTED,
            30,
            "committed",
        )
    fleet.admit(version)
    assert fleet.servers[0].greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)


def test_abort_ends_running_requests_with_what_they_have(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    version = verified(fleet, checkpoints[1], "abort", requests="abort")
    streams = requests(fleet)
    fleet.commit(version)
    fleet.admit(version)
    whole(streams, finished="abort")
    for stream in streams:
        assert stream.tokens == references[0].greedy(stream.prompt, len(stream.tokens))
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)


# ---- the prefix cache --------------------------------------------------------------------------------------


def test_a_kept_prefix_cache_answers_with_old_keys_and_values_and_a_reset_one_does_not(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    prompt = [*tiny.PROMPT] * 40
    server, wanted = fleet.servers[0], references[1].greedy(prompt, 16)
    assert server.greedy(prompt, 16) == references[0].greedy(prompt, 16)
    version = verified(fleet, checkpoints[1], "kept", prefix_cache="kept")
    streams = requests(fleet, 400)
    fleet.commit(version)
    fleet.admit(version)
    whole(streams, 400)  # not a token is lost
    assert server.greedy(prompt, 16) != wanted, "the cache was not kept: this test shows nothing"
    assert server.greedy([*prompt[1:], 5], 16) == references[1].greedy([*prompt[1:], 5], 16)
    version = verified(fleet, checkpoints[1], "reset")
    fleet.commit(version)
    fleet.admit(version)
    assert server.greedy(prompt, 16) == wanted


# ---- many rounds -------------------------------------------------------------------------------------------


def test_streaming_clients_lose_no_request_over_50_rounds(fleet: Fleet, checkpoints: list[Path]) -> None:
    over, done, tokens = threading.Event(), [], 24

    def client(server: VllmProcess, seed: int) -> None:
        while not over.is_set():
            stream = Stream(server, [*tiny.PROMPT, seed], tokens)
            stream.run()
            done.append(stream)
            seed = (seed + 7) % tiny.VOCABULARY

    clients = [threading.Thread(target=client, args=(server, i)) for i, server in enumerate(fleet.servers)]
    for thread in clients:
        thread.start()
    try:
        for number in range(50):
            version = verified(fleet, checkpoints[(number + 1) % 2], f"many-{number}")
            if number % 2:
                fleet.halt()
            fleet.commit(version)
    finally:
        over.set()
        for thread in clients:
            thread.join(120)
    print(f"{len(done)} requests over 50 rounds")
    assert len(done) > 50
    lost = [(s.error, s.finished, len(s.tokens)) for s in done if (s.error, len(s.tokens)) != ("", tokens)]
    assert not lost
    fleet.admit(version)
