"""A real vLLM server whose movers write its live weights, beside one with a shadow: what clients see of a round, and
of one that fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.vllm import tiny
from tests.integration.vllm.fleet import Fleet, switch, together
from tests.integration.vllm.serving import Operator, Stream, VllmProcess, streaming
from tests.integration.vllm.test_flip import SLOW, stopped

from weightsync_engine.protocol.messages import AgentState, EpochPhase, InferenceFacts, RoundPhase
from weightsync_engine.protocol.names import ENV_COMMIT, ENV_STEP_BYTES, IN_PLACE

pytestmark = pytest.mark.timeout(1800)

LONG = 1900
"""Tokens of a request that does not end by itself before its client stops it."""
SMALL_STEPS = "1024"
"""Bytes of a step: a transfer of a tiny model then takes long enough to be broken in the middle."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("in-place")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=False, kv_heads=1) for i in range(2)]


@pytest.fixture(scope="module")
def references(checkpoints: list[Path]) -> list[tiny.Reference]:
    return [tiny.Reference(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def made(folder: Path, checkpoints: list[Path]) -> Iterator[Fleet]:
    operator = Operator(folder / "operator")
    small = SLOW | {ENV_STEP_BYTES: SMALL_STEPS}
    servers = [
        VllmProcess(
            checkpoints[0], folder / name, operator,
            arguments=("--max-model-len", "2048"), environment=environment,
        )
        for name, environment in (("in-place", small | {ENV_COMMIT: IN_PLACE}), ("staged", small))
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_STEP_BYTES, SMALL_STEPS)
        with together(folder, operator, checkpoints[0], servers) as fleet:
            yield fleet


@pytest.fixture
def fleet(made: Fleet, checkpoints: list[Path]) -> Fleet:
    """In sync with the first checkpoint."""
    states = [made.operator.state(url).epoch for url in made.urls]
    if any(state is None or state.phase is not EpochPhase.JOINED for state in states):
        made.joined()
    made.sync(checkpoints[0], f"first-{made.round}")
    return made


def requests(fleet: Fleet) -> list[Stream]:
    """Two to each server; those of the server in place come first."""
    prompts = [(s, [*tiny.PROMPT, 10 * i + j]) for i, s in enumerate(fleet.servers) for j in (1, 2)]
    return streaming(prompts, LONG)


def facts(fleet: Fleet) -> InferenceFacts:
    """Of the server in place."""
    state = fleet.operator.state(fleet.servers[0].url)
    assert state.inference is not None
    return state.inference


def counts(streams: list[Stream]) -> list[int]:
    return [len(stream.tokens) for stream in streams]


def grow(streams: list[Stream], more: int = 20) -> None:
    before, deadline = counts(streams), time.monotonic() + 60
    while any(now < n + more for now, n in zip(counts(streams), before, strict=True)):
        assert not [s.error for s in streams if s.error]
        assert time.monotonic() < deadline, "a request does not go on"
        time.sleep(0.01)


def listening_mover(server: VllmProcess) -> int:
    """The one in the epoch, not the spare."""
    from tests.integration.vllm.test_server import _listens

    (mover,) = [pid for pid in server.movers() if any(_listens(pid))]
    return mover


def failed(state: AgentState) -> bool:
    return state.round is not None and state.round.phase in (RoundPhase.FAILED, RoundPhase.ABORTED)


def test_streams_stand_still_for_the_transfer_and_go_on_with_the_new_weights(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    streams = requests(fleet)
    in_place, staged = streams[:2], streams[2:]
    fleet.trainer.publish(checkpoints[1], "second")
    began = time.monotonic()
    fleet.prepare("second")
    standing = time.monotonic()
    late = Stream(fleet.servers[0], [*tiny.PROMPT, 99], 16)
    late.start()
    fleet.transfer()
    grow(staged)
    said = facts(fleet)
    assert (said.in_place, said.torn, said.serving) == (True, False, True)
    assert late.tokens == [], "a new request waits in the queue"
    flipping = time.monotonic()
    fleet.commit("second")
    fleet.admit("second")
    grow(in_place)
    stopped(streams)
    print(f"stood still after {standing - began:.2f} s, for {flipping - standing:.2f} s")
    for stream in in_place:
        # What was on its way to the client when the scheduler stopped.
        assert not [t for t in stream.times if standing + 0.3 < t < flipping], "tokens of half a version"
    for stream in streams:
        k = switch(stream.tokens, stream.prompt, *references)
        assert 0 < k < len(stream.tokens)
    late.join(60)
    assert late.tokens == references[1].greedy(late.prompt, 16)
    assert facts(fleet).live_version == "second"
    assert fleet.servers[0].complete(tiny.PROMPT, 1).headers["x-weightsync-version"] == "second"


def test_a_mover_killed_in_the_middle_leaves_503s_until_the_next_round(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    streams = requests(fleet)
    one, two = fleet.servers
    fleet.trainer.publish(checkpoints[1], "broken")
    fleet.prepare("broken")
    fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=60)
    fleet.operator.until(
        one.url, lambda s: s.round is not None and s.round.bytes_done > 0, 60, "bytes arrive"
    )
    os.kill(listening_mover(one), signal.SIGKILL)
    state = fleet.operator.until(one.url, lambda s: s.inference is not None and s.inference.torn, 60, "torn")
    assert state.inference is not None and state.round is not None
    assert state.round.phase is RoundPhase.FAILED
    assert not state.inference.serving
    assert "MoverLost" in state.inference.closed_because
    refused = one.complete(tiny.PROMPT, 4)
    assert refused.status_code == 503
    assert "of no one version" in refused.json()["error"]["message"]
    for stream in streams[:2]:
        stream.join(60)
        assert stream.finished == "abort"
        assert stream.tokens == references[0].greedy(stream.prompt, len(stream.tokens))
    assert fleet.operator.post(one.url, "admit", fleet.boot(one.url), version="broken").status_code == 409
    assert two.greedy(tiny.PROMPT, 8) == references[0].greedy(tiny.PROMPT, 8)
    stopped(streams[2:])

    fleet.until(failed, "the round has ended everywhere")
    fleet.joined()
    fleet.sync(checkpoints[1], "mended")
    assert not facts(fleet).torn
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)


def test_a_transfer_that_fails_before_the_first_byte_costs_no_token(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    streams = requests(fleet)
    fleet.trainer.publish(checkpoints[1], "frozen")
    fleet.prepare("frozen")
    victim = listening_mover(fleet.servers[0])
    os.kill(victim, signal.SIGSTOP)
    try:
        fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=5)
        fleet.until(failed, "the round fails by its deadline", 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    grow(streams)
    said = facts(fleet)
    assert (said.torn, said.serving) == (False, True)
    stopped(streams)
    assert [s.tokens for s in streams] == [references[0].greedy(s.prompt, len(s.tokens)) for s in streams]


def test_an_abort_of_what_was_written_wholly_leaves_the_server_torn_and_the_other_one_as_it_was(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    fleet.trainer.publish(checkpoints[1], "given-up")
    fleet.prepare("given-up")
    fleet.transfer()
    fleet.abort()
    one, two = fleet.servers
    fleet.operator.until(one.url, lambda s: s.inference is not None and s.inference.torn, 30, "torn")
    assert one.complete(tiny.PROMPT, 1).status_code == 503
    assert two.greedy(tiny.PROMPT, 16) == references[0].greedy(tiny.PROMPT, 16)
    fleet.sync(checkpoints[1], "again")
    assert one.greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)


def test_requests_that_do_not_end_in_time_fail_the_round_and_go_on(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    streams = requests(fleet)
    fleet.trainer.publish(checkpoints[1], "waited")
    fleet.round += 1
    body = {"epoch": fleet.epoch, "round": fleet.round, "version": "waited", "decide_by_seconds": 3600}
    fleet.tell("prepare", **body, deadline_seconds=2, flip={"requests": "wait"})
    state = fleet.operator.until(fleet.servers[0].url, failed, 30, "the round fails here")
    assert state.round is not None and state.round.problem is not None
    assert state.round.problem.reason == "RequestsRunning"
    fleet.operator.tell(
        fleet.servers[1].url, "abort", fleet.boot(fleet.servers[1].url), epoch=fleet.epoch, round=fleet.round,
        problem={"reason": "Test", "message": "no more"},
    )  # fmt: skip
    assert state.epoch is not None and state.epoch.phase is EpochPhase.JOINED
    stopped(streams)
    assert [s.tokens for s in streams] == [references[0].greedy(s.prompt, len(s.tokens)) for s in streams]
