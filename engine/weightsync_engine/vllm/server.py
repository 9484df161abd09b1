"""The vLLM server as the pod's agent sees it: what its workers hold, and the flip between two decode
steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from ..protocol.messages import FlipPolicy, Problem
from ..protocol.session import Flip

log = logging.getLogger(__name__)

RESUME_SECONDS = 30.0
"""How long the way out of a flip waits for the scheduler to go on."""
DESCRIBE_SECONDS = 60.0
WAIT_SHARE = 0.8
"""Part of a flip's time that requests have to end in; the rest is for the copy."""
GIVE_UP_SECONDS = 5.0
"""How long the way out of a pause that did not come about in time may take."""
END_SECONDS = 2.0
"""How long the answers of requests that were ended may take to be sent, before they are cut off."""

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
        self.in_place = False
        """The workers' movers write to the live weights, not beside them."""
        self.version: str | None = None
        """What the workers held when they were last asked."""
        self.seconds: dict[str, float] = {}
        """How long the parts of the last flip took."""
        self.running: set[asyncio.Task[Any]] = set()
        """Whoever answers a request that passed the guard."""
        self._encoder_cache = encoder_cache
        self.held = False
        """The scheduler stands still for a round, from `hold` on."""
        self._foreign = False
        """It stood still before, by somebody else's wish: that pause is not ours to end."""
        self._lock = asyncio.Lock()

    async def describe(self) -> list[str]:
        """Ask the workers who they are; sets `problem`. Returns the sockets of their movers, in rank
        order."""
        answers = await asyncio.wait_for(self._ask("weightsync_describe"), DESCRIBE_SECONDS)
        for answer in answers:
            if answer["problem"]:
                self.problem = _of_worker(answer)
                break
        self.in_place = any(answer.get("in_place", False) for answer in answers)
        return [str(answer.get("socket", "")) for answer in answers]

    async def live(self) -> tuple[str | None, bool]:
        """The version that every worker holds (None: as loaded), and whether they are of no one version."""
        answers = await self._ask("weightsync_live")
        versions = {answer.get("version", "") for answer in answers}
        torn = len(versions) > 1 or any(answer.get("torn", False) for answer in answers)
        version = next(iter(versions)) or None if not torn else None
        if not (torn and self.in_place and self.held):  # a transfer in place: what is served is as it was
            self.version = version
        return version, torn

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> Problem | None:
        """Stop the scheduler, with running requests as `policy` says, until `go_on`, `end_requests` or a flip that
        succeeds. New requests wait. Idempotent. With a problem, or cancelled, it goes on as before."""
        async with self._lock:
            if self.held:
                return None
            deadline = asyncio.get_running_loop().time() + deadline_seconds
            try:
                if (problem := await self._look(deadline)) is not None:
                    return problem
            except TimeoutError:
                return _late("before it was to stop", deadline_seconds)
            if self._foreign and self.in_place:
                message = (
                    "the scheduler was paused by somebody else, who may let it go on in the middle of a transfer in "
                    "place: resume it first"
                )
                return Problem(reason="PausedElsewhere", message=message)
            try:
                problem = await self._pause(policy, deadline, deadline_seconds)
                if problem is None and self.in_place:
                    # What is computed with the weights has been computed, on every worker's device as well.
                    told = await self._told(deadline, "weightsync_stand", {})
                    problem = told if isinstance(told, Problem) else None
                self.held = problem is None
            except TimeoutError:
                problem = _late("when it was to stop", deadline_seconds)
            finally:
                if not self.held:
                    await self._resume()
            return problem

    async def go_on(self) -> None:
        """Let a held scheduler go on with the weights that it has; nothing otherwise."""
        async with self._lock:
            if self.held:
                self.held = False
                await self._resume()

    async def end_requests(self) -> Problem | None:
        """The guard lets nothing through any more: end what runs, and let the scheduler go on. From here until the
        guard opens, not a token is generated. None: so it is."""
        async with self._lock:
            try:
                if not self.held:
                    self._foreign = await asyncio.wait_for(self.core.is_scheduler_paused_async(), END_SECONDS)
                # What was on its way into the engine waits there until it is ended as well.
                await asyncio.wait_for(self.core.pause_scheduler_async("abort", False), END_SECONDS)
                if self.running:
                    await asyncio.wait(self.running, timeout=END_SECONDS)
                # Clients that do not read, and requests that have not reached the engine yet.
                late = set(self.running)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late, timeout=END_SECONDS)
                await asyncio.wait_for(self.core.pause_scheduler_async("abort", False), END_SECONDS)
            except TimeoutError:
                return _late("when its requests were to end", END_SECONDS)
            finally:
                self.held = False
                await self._resume()
            if self.running:
                message = f"{len(self.running)} requests cannot be ended: restart this server"
                return Problem(reason="RequestsRunning", message=message)
            return None

    async def flip(self, flip: Flip) -> Problem | None:
        """Make the shadow live in every worker while the scheduler stands still between two steps.

        By default running requests are kept: their KV is computed anew under the new weights, and the prefix cache is
        emptied, so that no token is ever made of two versions. Idempotent. None: every worker serves the version. A
        flip that fails leaves the scheduler as it was: going on, or held.
        """
        async with self._lock:
            deadline = asyncio.get_running_loop().time() + flip.deadline_seconds
            begun = time.perf_counter()
            problem: Problem | None = None
            held, done = self.held, False
            if not held:
                try:
                    if (problem := await self._look(deadline)) is not None:
                        return problem
                except TimeoutError:
                    return _late("before the flip", flip.deadline_seconds)
            try:
                if not held:
                    problem = await self._pause(flip.policy, deadline, flip.deadline_seconds)
                paused = copied = time.perf_counter()
                if problem is None:
                    problem = await self._copy(deadline, flip)
                    copied = time.perf_counter()
                if problem is None:
                    problem = await self._settle(deadline, flip.version, flip.policy)
                done = problem is None
                self.seconds = {
                    "pause": paused - begun,
                    "copy": copied - paused,
                    "settle": time.perf_counter() - copied,
                }
            except TimeoutError:
                problem = _late("in the flip", flip.deadline_seconds)
            finally:
                if done or not held:
                    self.held = False
                    await self._resume()
            self.seconds["all"] = time.perf_counter() - begun
            log.info("flip to %s: %s", flip.version, problem.message if problem else self.seconds)
            return problem

    async def _look(self, deadline: float) -> Problem | None:
        """What stands against stopping the scheduler now."""
        if await _by(deadline, self.core.is_sleeping_async()):
            return Problem(reason="Sleeping", message="the server sleeps: wake it up before a flip")
        self._foreign = await _by(deadline, self.core.is_scheduler_paused_async())
        return None

    async def _pause(self, policy: FlipPolicy, deadline: float, seconds: float) -> Problem | None:
        """Between two steps the scheduler stands still; running requests are kept, gone by themselves, or ended."""
        if self._foreign:
            return None
        if policy.requests != "wait":
            await _by(deadline, self.core.pause_scheduler_async(policy.requests, False))
            return None
        patience = WAIT_SHARE * seconds
        try:
            await asyncio.wait_for(self.core.pause_scheduler_async("wait", False), patience)
        except (TimeoutError, asyncio.CancelledError) as e:
            # A pause that has not come about cannot be ended, but one that keeps requests takes its place at once.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.core.pause_scheduler_async("keep", False), GIVE_UP_SECONDS)
            if isinstance(e, asyncio.CancelledError):
                raise
            limit = "prepareSeconds" if self.in_place else "commitSeconds"
            message = (
                f"requests still ran after {patience:g} s, and spec.flip.requests is Wait: give them less to generate, "
                f"or spec.deadlines.{limit} more"
            )
            return Problem(reason="RequestsRunning", message=message)
        return None

    async def _copy(self, deadline: float, flip: Flip) -> Problem | None:
        version = flip.version
        arguments = {
            "object_uid": flip.object_uid, "epoch": flip.epoch, "round": flip.round, "version": version
        }  # fmt: skip
        answers = await self._told(deadline, "weightsync_flip", arguments)
        if isinstance(answers, Problem):
            return answers
        if any(answer["version"] != version or answer["torn"] for answer in answers):
            return Problem(reason="FlipIncomplete", message=f"not every worker says that it holds {version}")
        self.version = version
        return None

    async def _told(
        self, deadline: float, method: str, arguments: dict[str, Any]
    ) -> list[dict[str, Any]] | Problem:
        """What all workers answer, or the problem of one of them."""
        try:
            # No timeout inside vLLM: one there would leave answers behind that belong to no later call.
            answers = await _by(deadline, self._ask(method, arguments))
        except BadAnswer as e:
            return Problem(reason="WorkersOutOfStep", message=f"{e}: restart this server")
        return next((_of_worker(answer) for answer in answers if answer["problem"]), answers)

    async def _settle(self, deadline: float, version: str, policy: FlipPolicy) -> Problem | None:
        """Unless it is to be kept, nothing that was computed with the old weights answers a request from now on."""
        await _by(deadline, self.core.set_weight_version_async(version))
        if policy.prefix_cache == "kept":
            return None
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
        if self._foreign:
            return
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
