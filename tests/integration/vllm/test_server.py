"""Two real vLLM servers (tp 2 with fewer KV heads than ranks, tp 1) and two trainer ranks: whole rounds over
HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.vllm import serving, tiny
from tests.integration.vllm.fleet import Fleet, Trainer, switch, timed
from tests.integration.vllm.serving import Operator, Stream, VllmProcess, alive, streaming

from weightsync_engine.protocol.messages import EpochPhase, RoundPhase

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=False, kv_heads=1) for i in range(4)]


@pytest.fixture(scope="module")
def references(checkpoints: list[Path]) -> list[tiny.Reference]:
    return [tiny.Reference(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def operator(folder: Path) -> Operator:
    return Operator(folder / "operator")


@pytest.fixture(scope="module")
def servers(folder: Path, checkpoints: list[Path], operator: Operator) -> Iterator[list[VllmProcess]]:
    both = [
        VllmProcess(checkpoints[0], folder / "pod-a", operator, tp=2),
        VllmProcess(checkpoints[0], folder / "pod-b", operator, tp=1),
    ]
    try:
        for server in both:
            server.start()
        for server in both:
            server.wait_up()
        yield both
    finally:
        for server in both:
            server.kill()


@pytest.fixture(scope="module")
def fleet(
    folder: Path, checkpoints: list[Path], operator: Operator, servers: list[VllmProcess]
) -> Iterator[Fleet]:
    trainer = Trainer(folder / "trainer", operator, checkpoints[0])
    try:
        yield Fleet(operator, trainer, servers)
    finally:
        trainer.close()


# The tests of this file share servers and run in order: each leaves the fleet serving one version.


def test_a_server_starts_closed_and_says_what_it_waits_for(servers: list[VllmProcess]) -> None:
    for server in servers:
        refused = server.complete(tiny.PROMPT, 4)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "operator" in refused.json()["error"]["message"]
        ready = httpx.get(server.url + "/readyz", trust_env=False)
        assert (ready.status_code, "operator" in ready.json()["waiting_for"]) == (503, True)
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 200
        assert httpx.get(server.url + "/v1/models", trust_env=False).status_code == 200


def test_vllms_development_routes_stay_off(servers: list[VllmProcess]) -> None:
    for path in ("/pause", "/resume", "/update_weights", "/collective_rpc", "/init_weight_transfer_engine"):
        answer = httpx.post(servers[0].url + path, json={}, trust_env=False)
        assert answer.status_code in (404, 503), path


def test_nobody_but_the_operator_is_heard(
    operator: Operator, servers: list[VllmProcess], folder: Path
) -> None:
    url = servers[0].url
    state = operator.state(url)
    body = {"boot_id": state.boot_id, "object_uid": "u", "term": 1, "version": None}
    stranger = Operator(folder / "stranger")
    for headers in (
        {},
        {"Authorization": "Bearer not-a-token"},
        stranger.headers(),
        operator.headers(exp=int(time.time()) - 60),
        operator.headers(aud=["weightsync.dev/other/policy"]),
        operator.headers(sub="system:serviceaccount:rl:default"),
    ):
        answer = httpx.post(url + "/weightsync/v1/admit", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 401, answer.text
        assert httpx.get(url + "/weightsync/v1/state", headers=headers, trust_env=False).status_code == 401
    assert servers[0].complete(tiny.PROMPT, 1).status_code == 503
    assert operator.post(url, "admit", "another-process", version=None).status_code == 409
    assert operator.post(url, "join", state.boot_id, epoch="x").status_code == 422


def test_the_operators_word_opens_the_guard_for_the_loaded_weights(
    fleet: Fleet, references: list[tiny.Reference]
) -> None:
    fleet.admit(None)
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[0].greedy(tiny.PROMPT, 16)
        answer = server.complete(tiny.PROMPT, 1)
        assert answer.headers["x-weightsync-version"] == "loaded"
        assert httpx.get(server.url + "/readyz", trust_env=False).status_code == 200


def _streams(fleet: Fleet, tokens: int) -> list[Stream]:
    """Three requests to each server, each with a prompt of its own, all of them generating by now."""
    prompts = [
        (server, [*tiny.PROMPT, 100 * i + j]) for i, server in enumerate(fleet.servers) for j in range(3)
    ]
    return streaming(prompts, tokens)


def _whole(streams: list[Stream], tokens: int) -> None:
    for stream in streams:
        stream.join(300)
        assert (stream.error, stream.finished, len(stream.tokens)) == ("", "length", tokens)


def test_a_round_under_streaming_requests_loses_none_and_switches_each_once(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    with timed("join"):
        fleet.joined()
    fleet.trainer.publish(checkpoints[1], "step-1")
    fleet.prepare("step-1")
    tokens = 400
    during = _streams(fleet, 64)
    with timed("transfer"):
        fleet.transfer()
    _whole(during, 64)
    assert [s.tokens for s in during] == [references[0].greedy(s.prompt, 64) for s in during]
    # Begun only now: on a slow machine streams from before the transfer would be over before the flip.
    streams = _streams(fleet, tokens)
    with timed("commit"):
        fleet.commit("step-1")
    fleet.admit("step-1")
    _whole(streams, tokens)
    at = [switch(stream.tokens, stream.prompt, references[0], references[1]) for stream in streams]
    print("streams switched at", at)
    assert any(0 < k < tokens for k in at), "no stream ran across the flip: the test shows nothing"
    for server in fleet.servers:
        print(re.findall(r"flip to .*", server.log.read_text())[-1:])


def test_after_a_flip_everything_is_made_of_the_new_weights(
    fleet: Fleet, references: list[tiny.Reference]
) -> None:
    for server in fleet.servers:
        # The same prompt as before the flip: a prefix cache that was kept would answer it with old keys and
        # values.
        assert server.greedy(tiny.PROMPT, 32) == references[1].greedy(tiny.PROMPT, 32)
        long = [*tiny.PROMPT] * 8
        assert server.greedy(long, 8) == references[1].greedy(long, 8)
        assert server.complete(tiny.PROMPT, 1).headers["x-weightsync-version"] == "step-1"
        state = fleet.operator.state(server.url)
        assert state.inference is not None
        assert (state.inference.live_version, state.inference.torn, state.inference.serving) == (
            "step-1",
            False,
            True,
        )


def test_a_repeated_commit_changes_nothing(fleet: Fleet, references: list[tiny.Reference]) -> None:
    fleet.commit("step-1")
    for server in fleet.servers:
        assert len(re.findall(r"flip to step-1", server.log.read_text())) == 1
        assert server.greedy(tiny.PROMPT, 8) == references[1].greedy(tiny.PROMPT, 8)


def test_an_aborted_round_leaves_the_old_weights(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    fleet.trainer.publish(checkpoints[2], "step-2")
    fleet.prepare("step-2")
    fleet.transfer()
    fleet.abort()
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)
        assert fleet.operator.state(server.url).inference.live_version == "step-1"  # type: ignore[union-attr]


def _workers_mover(fleet: Fleet) -> int:
    """A mover of the tp 2 server that is in the epoch."""
    server = fleet.servers[0]
    listening = [pid for pid in server.movers() if any(_listens(pid))]
    assert listening, "no mover of this server listens"
    return listening[0]


def _listens(pid: int) -> Iterator[bool]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inode = re.match(r"socket:\[(\d+)\]", os.readlink(fd))
            if inode and re.search(rf" 01 {inode[1]} /.*mover-", Path("/proc/net/unix").read_text()):
                yield True


def test_a_mover_that_is_killed_is_replaced_and_the_server_goes_on(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    victim = _workers_mover(fleet)
    os.kill(victim, signal.SIGKILL)
    state = fleet.operator.until(
        fleet.servers[0].url,
        lambda s: s.epoch is not None and s.epoch.phase is EpochPhase.FAILED,
        30,
        "the epoch fails here",
    )
    assert state.epoch is not None and state.epoch.problem is not None
    assert fleet.servers[0].greedy(tiny.PROMPT, 16) == references[1].greedy(tiny.PROMPT, 16)
    fleet.joined()
    fleet.sync(checkpoints[2], "step-2")
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[2].greedy(tiny.PROMPT, 16)


def test_a_mover_that_is_frozen_stops_no_server_and_is_replaced_by_an_abort(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    fleet.trainer.publish(checkpoints[3], "step-3")
    fleet.prepare("step-3")
    victim = _workers_mover(fleet)
    os.kill(victim, signal.SIGSTOP)
    try:
        fleet.tell("transfer", epoch=fleet.epoch, round=fleet.round, deadline_seconds=5)
        assert fleet.servers[0].greedy(tiny.PROMPT, 16) == references[2].greedy(tiny.PROMPT, 16)
        fleet.until(
            lambda s: s.round is not None and s.round.phase is RoundPhase.FAILED,
            "the round fails by its deadline",
            60,
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[2].greedy(tiny.PROMPT, 16)
    fleet.joined()
    fleet.sync(checkpoints[3], "step-3")
    for server in fleet.servers:
        assert server.greedy(tiny.PROMPT, 16) == references[3].greedy(tiny.PROMPT, 16)


def test_a_container_that_restarts_in_place_never_answers_with_stale_weights(
    fleet: Fleet, checkpoints: list[Path], references: list[tiny.Reference]
) -> None:
    server = fleet.servers[1]
    former = fleet.boot(server.url)
    server.kill()
    server.start()
    seen: set[int] = set()
    deadline = time.monotonic() + serving.START_SECONDS
    while 503 not in seen:
        assert time.monotonic() < deadline, server.tail()
        with contextlib.suppress(httpx.TransportError):
            seen.add(server.complete(tiny.PROMPT, 1).status_code)
        time.sleep(0.05)
    server.wait_up()
    assert seen == {503}
    assert fleet.operator.post(server.url, "admit", former, version="step-3").status_code == 409
    boot = fleet.operator.until(
        server.url,
        lambda s: s.inference is not None and "NotReady" not in _admit(fleet, server, s.boot_id),
        30,
        "the workers are asked",
    ).boot_id
    assert "NotLive" in _admit(fleet, server, boot)
    assert server.complete(tiny.PROMPT, 1).status_code == 503
    fleet.joined()
    fleet.sync(checkpoints[3], "step-4")
    for one in fleet.servers:
        assert one.greedy(tiny.PROMPT, 16) == references[3].greedy(tiny.PROMPT, 16)


def _admit(fleet: Fleet, server: VllmProcess, boot: str) -> str:
    return fleet.operator.post(server.url, "admit", boot, version="step-3").text


def test_the_end_of_a_server_takes_its_movers_along_and_is_quick(servers: list[VllmProcess]) -> None:
    movers = {server.url: server.movers() for server in servers}
    for server in servers:
        took = server.terminate(30)
        print(f"stopped in {took:.2f} s")
        assert took < 5
        deadline = time.monotonic() + 10
        while left := [pid for pid in movers[server.url] if alive(pid)]:
            assert time.monotonic() < deadline, f"movers {left} outlive their server"
            time.sleep(0.05)
