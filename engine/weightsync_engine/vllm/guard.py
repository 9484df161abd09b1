"""The guard: pure ASGI, in vLLM's own process, in front of everything that generates.

While the agent does not serve, whatever may produce tokens is answered with 503 and the reason. Denied by
default: only what is known to produce nothing (health, metrics, models, documentation) and our own routes
pass.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..protocol.names import ENV_POD_NAME, ROUTE_PREFIX, ROUTE_READY

HEADER = "x-weightsync-version"
"""Response header: the version that was live when the response began; `loaded` for what vLLM loaded itself."""
POD_HEADER = "x-weightsync-pod"
"""Response header: the pod that answered, so that a client of a Service can tell its servers apart."""
RETRY_SECONDS = 2
OPEN_PATHS = frozenset(
    {
        "/health", "/ping", "/live", "/ready", "/load", "/metrics", "/version", "/server_info", "/v1/models",
        "/models", "/tokenize", "/detokenize", "/tokenizer_info", "/openapi.json", "/docs", "/redoc",
        "/docs/oauth2-redirect",
    }
)  # fmt: skip
"""Paths that never generate."""
OPEN_PREFIXES = ("/metrics/", "/static/")


@dataclass(frozen=True)
class Verdict:
    """Whether generation passes now."""

    passes: bool
    because: str = ""
    version: str = ""


class Gate(Protocol):
    """What the guard asks at every request."""

    def verdict(self) -> Verdict | None:
        """None: this server has nothing to do with weightsync, nothing is guarded."""

    @property
    def running(self) -> set[asyncio.Task[Any]]:
        """Whoever answers a request that may generate, while it does."""

    @property
    def routes(self) -> ASGIApp:
        """Our own routes."""


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, gate: Callable[[], Gate]) -> None:
        self.app = app
        self._pod = os.environ.get(ENV_POD_NAME) or socket.gethostname()
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        gate = self._gate()
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        if scope["type"] == "http" and (path == ROUTE_READY or path.startswith(ROUTE_PREFIX)):
            await gate.routes({**scope, "path": path, "root_path": ""}, receive, send)
            return
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES) or scope.get("method") == "OPTIONS":
            await self.app(scope, receive, send)
            return
        verdict = gate.verdict()
        if verdict is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket" and not verdict.passes:
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": verdict.because[:120]})
        elif not verdict.passes:
            await _refuse(send, verdict.because)
        else:
            task = asyncio.current_task()
            assert task is not None
            gate.running.add(task)
            try:
                await self.app(scope, receive, self._labelled(send, verdict.version))
            finally:
                gate.running.discard(task)

    def _labelled(self, send: Send, version: str) -> Send:
        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = version
                headers[POD_HEADER] = self._pod
            await send(message)

        return labelled


async def _refuse(send: Send, because: str) -> None:
    """As an OpenAI client expects an error, with the time after which it is worth another try."""
    error = {"message": f"not serving: {because}", "type": "ServiceUnavailable", "param": None, "code": 503}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_SECONDS).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
