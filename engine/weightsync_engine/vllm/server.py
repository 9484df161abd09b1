"""The vLLM server as the pod's agent sees it: what its workers hold, and the flip between two decode
steps."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from ..protocol.messages import Problem

log = logging.getLogger(__name__)

RESUME_SECONDS = 30.0
"""How long the way out of a flip waits for the scheduler to go on."""
DESCRIBE_SECONDS = 60.0

T = TypeVar("T")


class Core(Protocol):
    """What is used of vLLM's engine core client. These calls run between two decode steps, in order."""

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None: ...
    async def resume_scheduler_async(self) -> None: ...
    async def is_scheduler_paused_async(self) -> bool: ...
    async def is_sleeping_async(self) -> bool: ...
    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool: ...
    async def reset_encoder_cache_async(self) -> None: ...
    async def set_weight_version_async(self, weight_version: str) -> None: ...
    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]: ...


class BadAnswer(Exception):
    """The workers' answers are not one for each worker, of this very call."""


class VllmServer:
    """Drives a vLLM server: one engine, or several with data parallelism, of `workers` workers in all. `problem`:
    why the server cannot take part."""

    def __init__(self, core: Core, workers: int, *, encoder_cache: bool = False) -> None:
        self.core = core
        self.workers = workers
        self.problem: Problem | None = None
        self.version: str | None = None
        """What the workers held when they were last asked."""
        self.seconds: dict[str, float] = {}
        """How long the parts of the last flip took."""
        self._encoder_cache = encoder_cache
        self._lock = asyncio.Lock()

    async def describe(self) -> list[str]:
        """Ask the workers who they are; sets `problem`. Returns the sockets of their movers, in rank
        order."""
        answers = await asyncio.wait_for(self._ask("weightsync_describe"), DESCRIBE_SECONDS)
        for answer in answers:
            if answer["problem"]:
                self.problem = _of_worker(answer)
                break
        return [str(answer.get("socket", "")) for answer in answers]

    async def live(self) -> tuple[str | None, bool]:
        """The version that every worker holds (None: as loaded), and whether they are of no one version."""
        answers = await self._ask("weightsync_live")
        versions = {answer.get("version", "") for answer in answers}
        torn = len(versions) > 1 or any(answer.get("torn", False) for answer in answers)
        self.version = next(iter(versions)) or None if not torn else None
        return self.version, torn

    async def flip(
        self, object_uid: str, epoch: int, round: int, version: str, deadline_seconds: float
    ) -> Problem | None:
        """Make the shadow live in every worker while the scheduler stands still between two steps.

        Running requests are kept: their KV is computed anew under the new weights, and the prefix cache is
        emptied, so that no token is ever made of two versions. Idempotent. None: every worker serves the
        version.
        """
        async with self._lock:
            deadline = asyncio.get_running_loop().time() + deadline_seconds
            begun = time.perf_counter()
            try:
                if await _by(deadline, self.core.is_sleeping_async()):
                    return Problem(reason="Sleeping", message="the server sleeps: wake it up before a flip")
                # Paused by somebody else: that pause is not ours to end.
                foreign = await _by(deadline, self.core.is_scheduler_paused_async())
            except TimeoutError:
                return _late("before the flip", deadline_seconds)
            problem: Problem | None = None
            try:
                if not foreign:
                    await _by(deadline, self.core.pause_scheduler_async("keep", False))
                paused = time.perf_counter()
                problem = await self._copy(deadline, object_uid, epoch, round, version)
                copied = time.perf_counter()
                if problem is None:
                    problem = await self._settle(deadline, version)
                self.seconds = {
                    "pause": paused - begun,
                    "copy": copied - paused,
                    "settle": time.perf_counter() - copied,
                }
            except TimeoutError:
                problem = _late("in the flip", deadline_seconds)
            finally:
                if not foreign:
                    await self._resume()
            self.seconds["all"] = time.perf_counter() - begun
            log.info("flip to %s: %s", version, problem.message if problem else self.seconds)
            return problem

    async def _copy(
        self, deadline: float, object_uid: str, epoch: int, round_: int, version: str
    ) -> Problem | None:
        arguments = {"object_uid": object_uid, "epoch": epoch, "round": round_, "version": version}
        try:
            # No timeout inside vLLM: one there would leave answers behind that belong to no later call.
            answers = await _by(deadline, self._ask("weightsync_flip", arguments))
        except BadAnswer as e:
            return Problem(reason="WorkersOutOfStep", message=f"{e}: restart this server")
        for answer in answers:
            if answer["problem"]:
                return _of_worker(answer)
        if any(answer["version"] != version or answer["torn"] for answer in answers):
            return Problem(reason="FlipIncomplete", message=f"not every worker says that it holds {version}")
        self.version = version
        return None

    async def _settle(self, deadline: float, version: str) -> Problem | None:
        """Nothing that was computed with the old weights answers a request from now on."""
        await _by(deadline, self.core.set_weight_version_async(version))
        try:
            done = await _by(
                deadline,
                self.core.reset_prefix_cache_async(reset_running_requests=True, reset_connector=True),
            )
            if self._encoder_cache:
                await _by(deadline, self.core.reset_encoder_cache_async())
        except TimeoutError:
            raise
        except Exception as e:
            return Problem(
                reason="PrefixCacheKept", message=f"the prefix cache could not be emptied: {e}"[:1024]
            )
        if not done:
            message = "vLLM did not empty its prefix cache: blocks of it are still in use elsewhere"
            return Problem(reason="PrefixCacheKept", message=message)
        return None

    async def _resume(self) -> None:
        """Whatever came before, and also if this task is cancelled: the scheduler goes on."""
        resuming = asyncio.ensure_future(self.core.resume_scheduler_async())
        try:
            await asyncio.wait_for(asyncio.shield(resuming), RESUME_SECONDS)
        except TimeoutError:
            # The request stays queued: the engine takes it as soon as it is free again.
            resuming.add_done_callback(_consume)
            log.error("vLLM did not resume its scheduler in %g s: a worker hangs", RESUME_SECONDS)
        except asyncio.CancelledError:
            resuming.add_done_callback(_consume)
            raise
        except Exception:
            log.exception("resuming the scheduler failed")

    async def _ask(self, method: str, arguments: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """One answer of every worker, in rank order. Raises `BadAnswer`."""
        nonce = secrets.token_hex(8)
        # Of each engine; `collective_rpc_async` would return the answers of the first alone.
        of_engines = await self.core.call_utility_all_async(
            "collective_rpc", method, None, (), {**(arguments or {}), "nonce": nonce}
        )
        answers = [answer for engine in of_engines for answer in engine]
        if len(answers) != self.workers:
            raise BadAnswer(f"{len(answers)} answers from {self.workers} workers")
        if any(not isinstance(a, dict) or a.get("nonce") != nonce for a in answers):
            raise BadAnswer("vLLM's workers answer other calls than they were asked")
        if sorted(a["rank"] for a in answers) != list(range(self.workers)):
            raise BadAnswer(f"answers of ranks {[a['rank'] for a in answers]} from {self.workers} workers")
        return sorted(answers, key=lambda a: int(a["rank"]))


async def _by(deadline: float, call: Awaitable[T]) -> T:
    return await asyncio.wait_for(call, max(0.0, deadline - asyncio.get_running_loop().time()))


def _late(where: str, seconds: float) -> Problem:
    return Problem(reason="FlipTimeout", message=f"vLLM did not answer within {seconds:g} s {where}")


def _of_worker(answer: dict[str, Any]) -> Problem:
    said = answer["problem"]
    return Problem(reason=said["reason"], message=f"worker {answer['rank']}: {said['message']}"[:1024])


def _consume(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.error("resuming the scheduler failed: %s", future.exception())
