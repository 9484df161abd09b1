"""Entry point of `vllm.endpoint_plugins`: the pod's agent, as routes on vLLM's own port, and the guard.

vLLM loads it only where `VLLM_PLUGINS` names it (`VLLM_PLUGINS=weightsync`). In a server without the backend
it guards nothing: it only says, on its own routes, what is missing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import State
from starlette.responses import JSONResponse
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ..agent.core import AgentCore, make_pod
from ..agent.credentials import TokenVerifier, Unauthorized
from ..agent.routes import routes
from ..protocol.messages import FlipPolicy, Problem
from ..protocol.names import BACKEND
from ..protocol.session import Flip
from .guard import Guard, Verdict
from .plugin import log_with_vllm
from .server import VllmServer

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.engine.protocol import EngineClient

log = logging.getLogger(__name__)

LOADED = "loaded"
LEAVE_EVERY_SECONDS = 0.2
START_WITH = f'start vLLM with --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''


class EndpointPlugin:
    """What vLLM's API server instantiates, once for each of its processes."""

    name = BACKEND
    required_tasks = None

    def __init__(self) -> None:
        self.core: AgentCore | None = None
        self.server: VllmServer | None = None
        self.routes: ASGIApp = _starting
        self.running: set[asyncio.Task[Any]] = set()
        self._guarded = True
        self._leaving: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Put the guard, which also answers for our routes, in front of the app. Runs before `init_state`."""
        app.add_middleware(Guard, gate=lambda: self)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Build the agent over the engine client. Never raises: a server without an agent must still
        start."""
        log_with_vllm()
        try:
            await self._init(engine_client, state, args)
        except Exception as e:
            log.exception("the agent of this pod cannot start")
            because = f"the agent of this pod cannot start: {type(e).__name__}: {e}"
            self.routes = _Broken(because)

    async def _init(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        backend = None
        if engine_client is not None:
            config = engine_client.vllm_config.weight_transfer_config
            backend = config.backend if config is not None else None
        self._guarded = backend == BACKEND
        server, sockets = await _server_of(engine_client, backend, args)
        server.running = self.running
        if server.problem is not None:
            log.error("this server cannot take part: %s", server.problem.message)
        self.server = server
        pod = make_pod("inference", uuid.uuid4().hex, server.workers, in_place=server.in_place)
        core = AgentCore(pod, sockets, server)
        verifier: Any
        try:
            verifier = TokenVerifier.from_environment()
        except ValueError as e:
            log.error("no request of an operator can be accepted: %s", e)
            verifier = _NoVerifier(str(e))
        await core.start()
        self.routes = Router(routes=list(routes(core, verifier)))
        self.core = core
        self._leaving = asyncio.get_running_loop().create_task(
            _close_with(state, core), name="weightsync-leave"
        )

    def verdict(self) -> Verdict | None:
        """What the guard does with a request that may generate."""
        if not self._guarded:
            return None
        if self.core is None:
            because = self.routes.because if isinstance(self.routes, _Broken) else "the server is starting"
            return Verdict(False, because)
        if not self.core.serving:
            return Verdict(False, self.core.closed_because)
        version = self.server.version if self.server is not None else None
        return Verdict(True, "", version or LOADED)


async def _close_with(state: State, core: AgentCore) -> None:
    """End the agent, and with it the long polls, as soon as vLLM stops its HTTP server: it waits for every
    request that is still open, and a long poll would hold it up. vLLM tells plugins nothing of its end."""
    while not getattr(getattr(state, "server", None), "should_exit", False):  # noqa: ASYNC110
        await asyncio.sleep(LEAVE_EVERY_SECONDS)
    await core.close()


async def _server_of(
    engine_client: EngineClient | None, backend: str | None, args: Namespace
) -> tuple[VllmServer, list[str]]:
    """The server, and one mover socket for each worker. A server that cannot take part says why in
    `problem`."""
    if engine_client is None:
        return _unfit(None, 1, "NoEngine", "this vLLM process only renders prompts and holds no model")
    parallel = engine_client.vllm_config.parallel_config
    workers = parallel.world_size * parallel.data_parallel_size_local
    core: Any = getattr(engine_client, "engine_core", None)
    if backend != BACKEND:
        has = (
            f"its weight transfer backend is {backend!r}" if backend else "it has no weight transfer backend"
        )
        return _unfit(core, workers, "NoBackend", f"{has}: {START_WITH}")
    if core is None:
        kind = type(engine_client).__name__
        return _unfit(core, workers, "NotSupported", f"an engine client of type {kind} is not supported")
    processes = getattr(args, "api_server_count", None) or parallel._api_process_count
    if processes > 1:
        message = f"{processes} API server processes cannot share one agent: use --api-server-count 1"
        return _unfit(core, workers, "NotSupported", message)
    server = VllmServer(core, workers, encoder_cache=bool(engine_client.model_config.is_multimodal_model))
    try:
        sockets = await server.describe()
    except Exception as e:
        log.exception("the workers do not say who they are")
        message = f"the workers do not say who they are: {type(e).__name__}: {e}"
        return _unfit(core, workers, "WorkersSilent", message)
    return server, [socket or _nowhere(rank) for rank, socket in enumerate(sockets)]


class _Unfit(VllmServer):
    """A server that cannot take part: its workers hold what vLLM loaded, and nothing is asked of them."""

    async def live(self) -> tuple[str | None, bool]:
        return None, False

    async def flip(self, flip: Flip) -> Problem | None:
        return self.problem

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> Problem | None:
        return self.problem

    async def end_requests(self) -> Problem | None:
        return self.problem if self.core is None else await super().end_requests()


def _unfit(core: Any, workers: int, reason: str, message: str) -> tuple[VllmServer, list[str]]:
    server = _Unfit(core, workers)
    server.problem = Problem(reason=reason, message=message[:1024])
    return server, [_nowhere(rank) for rank in range(workers)]


def _nowhere(rank: int) -> str:
    """A path at which no mover will ever listen, for a worker that has none."""
    return f"/proc/{os.getpid()}/no-mover-of-worker-{rank}"


class _NoVerifier:
    """Refuses everybody: without keys nobody can prove to be the operator."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def verify(self, authorization: str | None) -> None:
        raise Unauthorized(f"this pod cannot check credentials: {self._why}")


class _Broken:
    """Answers for an agent that could not be built."""

    def __init__(self, because: str) -> None:
        self.because = because

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"ready": False, "waiting_for": self.because}, 503)(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"ready": False, "waiting_for": "the server is starting"}, 503)(scope, receive, send)
