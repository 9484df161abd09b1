"""The flip as the agent drives it, over a stand-in for vLLM's engine core client that records every call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightsync_engine.vllm.server import VllmServer


class FakeCore:
    """vLLM's engine core with `workers` workers. `fail` and `hang` name calls that raise or never answer."""

    def __init__(self, workers: int = 2) -> None:
        self.calls: list[str] = []
        self.paused = False
        self.sleeping = False
        self.fail: set[str] = set()
        self.hang: set[str] = set()
        self.reset = True
        self.label = "default"
        self.versions = [""] * workers
        self.problem: dict[int, dict[str, str]] = {}
        self.torn: set[int] = set()
        self.answers: Any = None

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hang:
            await asyncio.Event().wait()
        if name in self.fail:
            raise RuntimeError(f"{name} failed")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False), (
            "running requests and their caches are not dropped by a pause"
        )
        self.paused = True
        await self._called("pause")

    async def resume_scheduler_async(self) -> None:
        await self._called("resume")
        self.paused = False

    async def is_scheduler_paused_async(self) -> bool:
        return self.paused

    async def is_sleeping_async(self) -> bool:
        return self.sleeping

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        assert reset_running_requests, "a running request would keep blocks of the old weights in the cache"
        await self._called("reset")
        return self.reset

    async def reset_encoder_cache_async(self) -> None:
        await self._called("reset-encoder")

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._called("label")
        self.label = weight_version

    async def call_utility_all_async(self, call: str, *args: Any) -> list[Any]:
        """As of two engines, of which the first has one worker."""
        assert call == "collective_rpc"
        method, timeout, rest, kwargs = args
        assert (timeout, rest) == (None, ()), "a timeout inside vLLM would desynchronise later answers"
        what = method.removeprefix("weightsync_")
        await self._called(what)
        if what == "flip":
            self.versions = [
                old if rank in self.problem else kwargs["version"] for rank, old in enumerate(self.versions)
            ]
        answers = [
            {
                "rank": rank, "nonce": kwargs["nonce"], "version": version, "torn": rank in self.torn,
                "problem": self.problem.get(rank, {}), "socket": f"/run/mover-{rank}.sock",
            }
            for rank, version in enumerate(self.versions)
        ]  # fmt: skip
        answers = self.answers(answers) if self.answers else answers
        return [answers[:1], answers[1:]]


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def server(core: FakeCore) -> VllmServer:
    return VllmServer(core, 2)


async def flip(server: VllmServer, seconds: float = 5.0) -> Any:
    return await server.flip("uid", 3, 7, "step-7", seconds)


async def test_the_prefix_cache_is_emptied_once_after_the_copy_and_before_the_scheduler_goes_on(
    core: FakeCore, server: VllmServer
) -> None:
    # C36
    assert await flip(server) is None
    assert core.calls == ["pause", "flip", "label", "reset", "resume"]
    assert (core.label, core.paused, server.version) == ("step-7", False, "step-7")


async def test_a_server_with_an_encoder_forgets_its_outputs_as_well(core: FakeCore) -> None:
    assert await flip(VllmServer(core, 2, encoder_cache=True)) is None
    assert core.calls == ["pause", "flip", "label", "reset", "reset-encoder", "resume"]


@pytest.mark.parametrize("step", ["pause", "flip", "label", "reset"])
async def test_whatever_fails_the_scheduler_goes_on(core: FakeCore, server: VllmServer, step: str) -> None:
    # C08
    core.fail.add(step)
    try:
        problem = await flip(server)
    except RuntimeError:
        problem = step
    assert problem is not None
    assert core.calls[-1] == "resume"
    assert not core.paused


@pytest.mark.parametrize("step", ["pause", "flip", "label", "reset"])
async def test_whatever_hangs_the_flip_ends_at_its_deadline_and_resumes(
    core: FakeCore, server: VllmServer, step: str
) -> None:
    core.hang.add(step)
    problem = await asyncio.wait_for(flip(server, 0.05), 2.0)
    assert problem is not None
    assert problem.reason == "FlipTimeout"
    assert core.calls[-1] == "resume"


async def test_a_cancelled_flip_resumes(core: FakeCore, server: VllmServer) -> None:
    core.hang.add("flip")
    task = asyncio.create_task(flip(server))
    while "flip" not in core.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core.calls[-1] == "resume"
    assert not core.paused


async def test_a_pause_of_somebody_else_is_not_ended(core: FakeCore, server: VllmServer) -> None:
    core.paused = True
    assert await flip(server) is None
    assert core.calls == ["flip", "label", "reset"]
    assert core.paused


async def test_a_sleeping_server_is_not_flipped(core: FakeCore, server: VllmServer) -> None:
    core.sleeping = True
    assert (await flip(server)).reason == "Sleeping"
    assert core.calls == []


async def test_the_worker_that_could_not_flip_is_named_and_the_label_stays(
    core: FakeCore, server: VllmServer
) -> None:
    core.problem[1] = {"reason": "ShadowNotVerified", "message": "the shadow holds nothing whole"}
    problem = await flip(server)
    assert problem.reason == "ShadowNotVerified"
    assert problem.message.startswith("worker 1:")
    assert core.label == "default"
    assert core.calls == ["pause", "flip", "resume"]


async def test_workers_of_unlike_versions_are_torn(core: FakeCore, server: VllmServer) -> None:
    core.versions = ["step-6", "step-7"]
    assert await server.live() == (None, True)
    core.versions = ["step-7", "step-7"]
    assert await server.live() == ("step-7", False)
    core.versions = ["", ""]
    assert await server.live() == (None, False)
    core.torn.add(0)
    assert await server.live() == (None, True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answers: answers[:1],
        lambda answers: [answers[0], answers[0]],
        lambda answers: [answers[0], {**answers[1], "nonce": "of another call"}],
        lambda answers: [answers[0], None],
    ],
    ids=["too-few", "one-rank-twice", "another-calls-answer", "no-answer"],
)
async def test_answers_that_are_not_one_of_every_worker_to_this_call_are_not_believed(
    core: FakeCore, server: VllmServer, spoil: Any
) -> None:
    core.answers = spoil
    problem = await flip(server)
    assert problem.reason == "WorkersOutOfStep"
    assert "restart this server" in problem.message
    assert core.label == "default"


async def test_a_cache_that_cannot_be_emptied_fails_the_flip_and_a_repeat_mends_it(
    core: FakeCore, server: VllmServer
) -> None:
    core.reset = False
    assert (await flip(server)).reason == "PrefixCacheKept"
    core.reset = True
    assert await flip(server) is None


async def test_a_problem_of_one_worker_is_the_servers(core: FakeCore, server: VllmServer) -> None:
    assert await server.describe() == ["/run/mover-0.sock", "/run/mover-1.sock"]
    assert server.problem is None
    core.problem[1] = {"reason": "Unresolved", "message": "1 of 9 parameters cannot be updated"}
    await server.describe()
    assert server.problem is not None
    assert server.problem.message == "worker 1: 1 of 9 parameters cannot be updated"
