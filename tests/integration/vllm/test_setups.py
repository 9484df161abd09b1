"""Servers that cannot take part: they start, serve, and say why."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import Operator, VllmProcess, alive, running

from weightsync_engine.protocol.names import ROUTE_STATE

pytestmark = pytest.mark.timeout(1800)

STOPS = int(os.environ.get("WEIGHTSYNC_STOPS", "2"))
"""How often a server at tp 2 is started and stopped. 20 for the long run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("setups")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return tiny.make_checkpoint(folder / "model", 1, tied=True)


@pytest.fixture(scope="module")
def operator(folder: Path) -> Operator:
    return Operator(folder / "operator")


@pytest.fixture(scope="module")
def servers(folder: Path, checkpoint: Path, operator: Operator) -> Iterator[dict[str, VllmProcess]]:
    """`packed`: vLLM's CPU build as it is; `plain`: without the backend. Started side by side."""
    found = {
        "packed": VllmProcess(checkpoint, folder / "packed", operator, live_weights=False),
        "plain": VllmProcess(checkpoint, folder / "plain", operator, backend=None, live_weights=False),
    }
    try:
        for server in found.values():
            server.start()
        for server in found.values():
            server.wait_up()
        yield found
    finally:
        for server in found.values():
            server.kill()


def test_a_build_that_packs_its_weights_is_refused_by_parameter_and_serves_what_it_loaded(
    servers: dict[str, VllmProcess], operator: Operator, checkpoint: Path
) -> None:
    server = servers["packed"]
    state = operator.state(server.url)
    assert state.problem is not None
    assert state.problem.reason == "Unresolved"
    assert "16 of 25 parameters cannot be updated" in state.problem.message
    assert (
        "model.layers.0.self_attn.q_proj.weight (and 13 more): its live tensor is empty"
        in state.problem.message
    )
    assert server.complete(tiny.PROMPT, 1).status_code == 503
    operator.until(
        server.url,
        lambda s: operator.post(server.url, "admit", s.boot_id, version=None).status_code == 200,
        30,
        "admitted",
    )
    assert server.greedy(tiny.PROMPT, 16) == tiny.Reference(checkpoint).greedy(tiny.PROMPT, 16)
    ready = httpx.get(server.url + "/readyz", trust_env=False)
    assert (ready.status_code, "cannot be updated" in ready.json()["waiting_for"]) == (503, True)
    assert server.movers() == []


def test_a_server_without_the_backend_is_not_guarded_and_says_what_to_start_it_with(
    servers: dict[str, VllmProcess], operator: Operator, checkpoint: Path
) -> None:
    server = servers["plain"]
    answer = server.complete(tiny.PROMPT, 1)
    assert answer.status_code == 200
    assert "x-weightsync-version" not in answer.headers
    state = operator.state(server.url)
    assert state.problem is not None
    assert state.problem.reason == "NoBackend"
    assert """--weight-transfer-config '{"backend": "weightsync"}'""" in state.problem.message
    ready = httpx.get(server.url + "/readyz", trust_env=False)
    assert (ready.status_code, "--weight-transfer-config" in ready.json()["waiting_for"]) == (503, True)
    assert server.movers() == []


@pytest.mark.parametrize("stop", range(STOPS))
def test_a_server_at_tp_2_with_movers_and_an_open_long_poll_stops_within_5_seconds(
    folder: Path, checkpoint: Path, operator: Operator, stop: int
) -> None:
    with running(VllmProcess(checkpoint, folder / f"stop-{stop}", operator, tp=2)) as server:
        movers = server.movers()
        assert len(movers) >= 2
        seen = operator.until(server.url, lambda s: s.inference is not None, 30).revision
        poll = threading.Thread(target=_poll, args=(server.url, operator, seen), daemon=True)
        poll.start()
        poll.join(1.0)
        assert poll.is_alive(), "the long poll must be open when the server is told to stop"
        took = server.terminate(40)
        print(f"stopped in {took:.2f} s")
        assert took < 5
        assert _gone(movers), "movers outlive their server"


def _poll(url: str, operator: Operator, seen: int) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(
            url + ROUTE_STATE, params={"seen": seen, "wait": 30}, headers=operator.headers(), timeout=60,
            trust_env=False,
        )  # fmt: skip


def _gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
