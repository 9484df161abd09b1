"""The operator's connections to agents."""

from __future__ import annotations

import logging

import aiohttp
import pytest
from tests.integration.trainer.ranks import free_port

from weightsync_engine.protocol.messages import Abort, Problem
from weightsync_operator.adapters.agents import Agents
from weightsync_operator.core.members import Pod
from weightsync_operator.core.rounds import Send


class Tokens:
    async def get(self, namespace: str, name: str) -> str:
        return "token"


async def test_what_fails_in_the_same_way_again_and_again_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    pod = Pod("vllm-0", "uid-0", "inference", "Running", "127.0.0.1", free_port())
    why = Problem(reason="Test", message="no more")
    abort = Abort(boot_id="boot-0", object_uid="uid", term=1, epoch=1, round=1, problem=why)
    async with aiohttp.ClientSession() as http:
        agents = Agents(http, Tokens(), "rl", "policy", lambda: None)  # type: ignore[arg-type]
        agents.track([pod])
        link = agents._links[pod.uid]
        for _ in range(3):
            await link._post(Send(pod.name, pod.uid, "abort", abort))
        await link._post(Send(pod.name, pod.uid, "fence", abort))
        await agents.close()
    said = [record.getMessage() for record in caplog.records if "vllm-0" in record.getMessage()]
    assert len(said) == 2
    assert said[0].startswith("pod vllm-0: abort: ") and said[1].startswith("pod vllm-0: fence: ")
