"""The flip as the agent drives it, over a stand-in for vLLM's engine core client that records every call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightsync_engine.protocol.messages import FlipPolicy
from weightsync_engine.protocol.session import Flip
from weightsync_engine.vllm import server as module
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
        assert not clear_cache, "what becomes of the caches is no matter of a pause"
        if mode != "wait":
            self.paused = True
        await self._called("pause" if mode == "keep" else mode)
        self.paused = True

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


KEEP = FlipPolicy()
WAIT = FlipPolicy(requests="wait")
ABORT = FlipPolicy(requests="abort")


async def flip(server: VllmServer, seconds: float = 5.0, policy: FlipPolicy = KEEP) -> Any:
    return await server.flip(Flip("uid", 3, 7, "step-7", seconds, policy))


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


# ---- what becomes of requests and caches -------------------------------------------------------------------


async def test_requests_are_waited_for_or_ended_as_the_policy_says(
    core: FakeCore, server: VllmServer
) -> None:
    assert await flip(server, policy=WAIT) is None
    assert core.calls == ["wait", "flip", "label", "reset", "resume"]
    core.calls.clear()
    assert await flip(server, policy=ABORT) is None
    assert core.calls == ["abort", "flip", "label", "reset", "resume"]


async def test_a_prefix_cache_that_is_to_be_kept_is_not_touched(core: FakeCore) -> None:
    server = VllmServer(core, 2, encoder_cache=True)
    assert await flip(server, policy=FlipPolicy(prefix_cache="kept")) is None
    assert core.calls == ["pause", "flip", "label", "resume"]


async def test_requests_without_an_end_fail_the_flip_in_time_and_the_old_version_goes_on(
    core: FakeCore, server: VllmServer
) -> None:
    core.hang.add("wait")
    problem = await asyncio.wait_for(flip(server, 0.1, WAIT), 2.0)
    assert problem.reason == "RequestsRunning"
    assert "Wait" in problem.message and "commitSeconds" in problem.message
    # vLLM cannot take back a pause that waits; one that keeps requests takes its place, and that one it can.
    assert core.calls == ["wait", "pause", "resume"]
    assert (core.label, core.paused) == ("default", False)


async def test_a_flip_that_is_cancelled_while_it_waits_goes_on(core: FakeCore, server: VllmServer) -> None:
    core.hang.add("wait")
    task = asyncio.create_task(flip(server, policy=WAIT))
    while "wait" not in core.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert core.calls[-1] == "resume" and not core.paused


# ---- standing still for a barrier --------------------------------------------------------------------------


async def test_a_held_server_stands_still_until_its_flip(core: FakeCore, server: VllmServer) -> None:
    assert await server.hold(KEEP, 5.0) is None
    assert await server.hold(KEEP, 5.0) is None
    assert core.calls == ["pause"] and core.paused
    assert await flip(server) is None
    assert core.calls == ["pause", "flip", "label", "reset", "resume"]
    await server.go_on()
    assert core.calls[-1] == "resume" and core.calls.count("resume") == 1


async def test_a_held_server_goes_on_when_told(core: FakeCore, server: VllmServer) -> None:
    await server.hold(ABORT, 5.0)
    await server.go_on()
    assert core.calls == ["abort", "resume"]


async def test_a_transfer_in_place_is_no_other_version_to_clients_until_it_has_failed(
    core: FakeCore, server: VllmServer
) -> None:
    core.answers = lambda answers: [answer | {"in_place": True} for answer in answers]
    core.versions = ["step-6", "step-6"]
    await server.describe()
    assert server.in_place
    await server.live()
    await server.hold(KEEP, 5.0)
    core.torn.add(1)
    assert await server.live() == (None, True), "the worker's word"
    assert server.version == "step-6", "what answers say that they are made of"
    await server.end_requests()
    assert await server.live() == (None, True)
    assert server.version is None


async def test_for_a_transfer_in_place_the_workers_devices_have_ended_what_they_computed(
    core: FakeCore, server: VllmServer
) -> None:
    server.in_place = True
    assert await server.hold(KEEP, 5.0) is None
    assert core.calls == ["pause", "stand"] and core.paused


@pytest.mark.parametrize("how", ["hangs", "answers of another call", "a worker's problem"])
async def test_workers_that_do_not_say_that_they_stand_still_are_not_written_to(
    core: FakeCore, server: VllmServer, how: str
) -> None:
    server.in_place = True
    if how == "hangs":
        core.hang.add("stand")
    elif how == "a worker's problem":
        core.problem[1] = {"reason": "WorkerFailed", "message": "device lost"}
    else:
        core.answers = lambda answers: [answers[0], None]
    problem = await server.hold(KEEP, 0.05)
    assert problem is not None
    reason = {"hangs": "FlipTimeout", "a worker's problem": "WorkerFailed"}.get(how, "WorkersOutOfStep")
    assert problem.reason == reason
    assert core.calls == ["pause", "stand", "resume"] and not core.paused and not server.held


async def test_a_scheduler_that_somebody_else_paused_is_not_trusted_for_a_transfer_in_place(
    core: FakeCore, server: VllmServer
) -> None:
    server.in_place = True
    core.paused = True
    problem = await server.hold(KEEP, 5.0)
    assert problem is not None and problem.reason == "PausedElsewhere"
    assert "resume it first" in problem.message
    assert (core.calls, core.paused, server.held) == ([], True, False)


@pytest.mark.parametrize("step", ["flip", "label", "reset"])
async def test_a_flip_that_fails_leaves_a_held_server_still_until_its_requests_are_ended(
    core: FakeCore, server: VllmServer, step: str
) -> None:
    await server.hold(KEEP, 5.0)
    core.hang.add(step)
    assert (await flip(server, 0.05)).reason == "FlipTimeout"
    assert core.paused, "what runs would go on with the old weights"
    assert await server.end_requests() is None
    assert core.calls[-3:] == ["abort", "abort", "resume"] and not core.paused


@pytest.mark.parametrize("how", ["hangs", "fails", "cancelled"])
async def test_a_server_that_cannot_be_held_goes_on(core: FakeCore, server: VllmServer, how: str) -> None:
    (core.fail if how == "fails" else core.hang).add("pause")
    task = asyncio.create_task(server.hold(KEEP, 60.0 if how == "cancelled" else 0.05))
    if how == "cancelled":
        while "pause" not in core.calls:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert result is not None
    assert core.calls[-1] == "resume" and not core.paused


async def test_requests_that_do_not_end_by_themselves_are_cut_off_before_the_scheduler_goes_on(
    core: FakeCore, server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not read, or a request that has passed the guard and not yet reached the engine."""
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    seen: list[bool] = []

    async def answer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(core.paused)

    task = asyncio.create_task(answer())
    server.running.add(task)
    task.add_done_callback(server.running.discard)
    await server.hold(KEEP, 5.0)
    assert await server.end_requests() is None
    assert seen == [True] and not core.paused


async def test_requests_that_cannot_be_ended_are_told_and_the_scheduler_goes_on(
    core: FakeCore, server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.05)
    enough = asyncio.Event()

    async def answer() -> None:
        while not enough.is_set():
            try:
                await enough.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(answer())
    server.running.add(task)
    problem = await server.end_requests()
    assert problem is not None and problem.reason == "RequestsRunning"
    assert not core.paused
    enough.set()
    await task
