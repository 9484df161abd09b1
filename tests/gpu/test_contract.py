"""Without Kubernetes, on a GPU: two real vLLM servers and a trainer of two FSDP2 ranks that is written against vLLM's
own trainer contract and its HTTP routes.

Each server loads another checkpoint by itself: what it says at first is what the other one must say of that checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gpu.test_server import TOKENS, server
from tests.integration.trainer.ranks import contract_trainer, free_port
from tests.integration.vllm import tiny
from tests.integration.vllm.serving import Operator, VllmProcess

from weightsync_engine.trainer.contract import unique_id

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> list[Path]:
    return [tiny.make_checkpoint(folder / f"model-{i}", i, tied=False, dtype="bfloat16") for i in range(2)]


@pytest.fixture(scope="module")
def servers(folder: Path, checkpoints: list[Path]) -> Iterator[list[VllmProcess]]:
    operator = Operator(folder / "operator")
    # No plugin is named, so vLLM loads all general ones and no endpoint plugin: no agent, no guard.
    both = [
        server(checkpoint, folder / f"pod-{i}", operator, VLLM_SERVER_DEV_MODE="1", VLLM_PLUGINS=None)
        for i, checkpoint in enumerate(checkpoints)
    ]
    try:
        for one in both:
            one.start()
        for one in both:
            one.wait_up()
        yield both
    finally:
        for one in both:
            one.kill()


@pytest.fixture(scope="module")
def fresh(servers: list[VllmProcess]) -> list[list[int]]:
    found = [one.greedy(tiny.PROMPT, TOKENS) for one in servers]
    assert found[0] != found[1]
    return found


def said(servers: list[VllmProcess]) -> list[list[int]]:
    for one in servers:
        httpx.post(one.url + "/reset_prefix_cache", trust_env=False, timeout=30)
    return [one.greedy(tiny.PROMPT, TOKENS) for one in servers]


@pytest.mark.parametrize("way", ["address", "unique-id"])
def test_versions_travel_to_both_servers(
    folder: Path, servers: list[VllmProcess], checkpoints: list[Path], fresh: list[list[int]], way: str
) -> None:
    where: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": free_port()}
    if way == "unique-id":
        where = {"unique_id": unique_id("127.0.0.1"), "names_per_update": 7}
    urls = [one.url for one in servers]
    with contract_trainer(folder / way, urls, [1, 1], checkpoints[0], "cuda", **where) as (ranks, met):
        assert [rank["error"] for rank in met] == ["", ""]
        for turn, which in enumerate((1, 0, 1)):
            sent = ranks.run(json.dumps([f"{way}-{turn}", str(checkpoints[which])]))
            assert [rank["error"] for rank in sent] == ["", ""]
            assert said(servers) == [fresh[which]] * 2
        if way == "unique-id":
            undeclared(servers[0])
            assert said(servers) == [fresh[1]] * 2
        assert ranks.run("end") == ["ended"] * 2


def undeclared(one: VllmProcess) -> None:
    """An update of a name that no server has is refused."""
    update = {"version": "stray", "round": 99, "deadline_seconds": 5, "names": ["model.no.such.weight"]}
    httpx.post(f"{one.url}/start_weight_update", trust_env=False, timeout=60)
    answer = httpx.post(
        f"{one.url}/update_weights", json={"update_info": update}, trust_env=False, timeout=60
    )
    assert answer.status_code >= 400
