"""Without Kubernetes: two real vLLM servers (tp 1, tp 2), and a trainer of two ranks (FSDP2) that is written against
vLLM's own trainer contract and its HTTP routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.trainer.ranks import contract_trainer, free_port
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import Operator, VllmProcess

from weightsync_engine.trainer.contract import unique_id

pytestmark = pytest.mark.timeout(1800)
WORKERS = [1, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=False) for i in range(3)]


@pytest.fixture(scope="module")
def servers(folder: Path, checkpoints: list[Path]) -> Iterator[list[VllmProcess]]:
    operator = Operator(folder / "operator")
    # No plugin is named, so vLLM loads all general ones and no endpoint plugin: no agent, no guard.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": None}
    both = [
        VllmProcess(checkpoints[0], folder / f"tp-{tp}", operator, tp=tp, environment=environment)
        for tp in WORKERS
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


def serves(servers: list[VllmProcess], checkpoint: Path) -> bool:
    wanted = tiny.Reference(checkpoint).greedy(tiny.PROMPT, 16)
    for server in servers:
        httpx.post(server.url + "/reset_prefix_cache", trust_env=False, timeout=30)
    return all(server.greedy(tiny.PROMPT, 16) == wanted for server in servers)


def test_versions_travel_by_address_and_port(
    folder: Path, servers: list[VllmProcess], checkpoints: list[Path]
) -> None:
    assert serves(servers, checkpoints[0])
    where = {"master_address": "127.0.0.1", "master_port": free_port()}
    urls = [server.url for server in servers]
    with contract_trainer(folder / "one", urls, WORKERS, checkpoints[0], **where) as (ranks, met):
        assert [rank["error"] for rank in met] == ["", ""]
        for number in (1, 2, 1):
            sent = ranks.run(json.dumps([None, str(checkpoints[number])]))
            assert [rank["error"] for rank in sent] == ["", ""]
            assert serves(servers, checkpoints[number])
        assert ranks.run("end") == ["ended"] * 2


def test_versions_travel_by_unique_id_with_names_in_chunks_and_an_undeclared_name_is_refused(
    folder: Path, servers: list[VllmProcess], checkpoints: list[Path]
) -> None:
    meeting = unique_id("127.0.0.1")
    urls = [server.url for server in servers]
    how = {"unique_id": meeting, "names_per_update": 7}
    with contract_trainer(folder / "two", urls, WORKERS, checkpoints[0], **how) as (ranks, met):
        assert [rank["error"] for rank in met] == ["", ""]
        sent = ranks.run(json.dumps(["chunks-1", str(checkpoints[2])]))
        assert [rank["error"] for rank in sent] == ["", ""]
        assert serves(servers, checkpoints[2])
        single = servers[0].url
        update = {"version": "stray", "round": 99, "deadline_seconds": 5, "names": ["model.no.such.weight"]}
        for path, body in (("start_weight_update", None), ("update_weights", {"update_info": update})):
            answer = httpx.post(f"{single}/{path}", json=body, trust_env=False, timeout=60)
        assert answer.status_code >= 400
        assert serves(servers, checkpoints[2])


def test_a_server_that_cannot_be_reached_is_told_on_every_rank(
    folder: Path, servers: list[VllmProcess], checkpoints: list[Path]
) -> None:
    urls = [servers[0].url, f"http://127.0.0.1:{free_port()}"]
    where = {"master_address": "127.0.0.1", "deadline_seconds": 5}
    with contract_trainer(folder / "three", urls, WORKERS, checkpoints[0], **where) as (_, met):
        assert all("server 1 of 2" in rank["error"] for rank in met), [rank["error"] for rank in met]
        assert all(rank["seconds"] < 60 for rank in met)
