"""The trainer pod's agent: `python -m weightsync_engine.agent`, started by `AgentSupervisor` only.

One line of JSON on stdin is its configuration; its life hangs on that pipe. When it listens it says
`up <port>` on stdout, and `alive` every other second; when it cannot, `failed <why>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette

from .config import AgentConfig
from .core import AgentCore, make_pod
from .credentials import TokenVerifier
from .routes import routes

log = logging.getLogger(__name__)

PARENT_SECONDS = 1.0
"""How often the agent looks whether its parent still lives: a fork of the parent may hold the pipe open."""
ALIVE_SECONDS = 2.0
"""How often the parent hears that the agent's loop runs."""
MOVERS_LEAVE_SECONDS = 6.0
"""How long the agent waits for the movers to leave, before it removes the folder of their sockets."""
CONFIG_LIMIT = 1 << 20
STORE_MODULE = "weightsync_engine.transport.store"


class EpochStore:
    """The epoch's store, listening on the pod's own address for as long as it is kept."""

    def __init__(self, host: str) -> None:
        # Needs torch, which only the agent that hosts rank 0 imports.
        from ..transport.store import open_store

        self._store: object
        self._store, rendezvous = open_store(host)
        self.port = rendezvous.port

    def close(self) -> None:
        self._store = None


class _Server(uvicorn.Server):
    """Ends the agent's open long polls before it waits for requests, so that a restart takes no longer for them."""

    def __init__(self, config: uvicorn.Config, core: AgentCore) -> None:
        super().__init__(config)
        self._core = core

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._core.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on all addresses of the pod, of the family that its own address has."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by its connections. asyncio sees to it for its own sockets only; without it the second part of
        # every answer waits 40 ms for the peer's acknowledgement of the first.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(("::" if family is socket.AF_INET6 else "0.0.0.0", port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock


async def serve(config: AgentConfig) -> None:
    """Serve until stdin ends or the parent is gone."""
    verifier = TokenVerifier.from_environment()
    pod = make_pod(
        "trainer",
        uuid.uuid4().hex,
        len(config.ranks),
        run_id=config.run_id,
        trainer_ranks=config.ranks,
        trainer_world=config.world_size,
    )
    core = AgentCore(pod, config.movers, open_store=EpochStore)
    sock = listen(pod.host, config.port)
    server = _Server(
        uvicorn.Config(
            Starlette(routes=list(routes(core, verifier))),
            loop="asyncio",
            lifespan="off",
            access_log=False,
            log_config=None,
            limit_concurrency=256,
            timeout_graceful_shutdown=2,
            # Longer than a long poll: after its default of 5 s uvicorn cuts connections that are used again.
            timeout_keep_alive=75,
        ),
        core,
    )
    await core.start()
    if pod.lead:
        # Imports torch while there is time, not when an epoch waits for it.
        threading.Thread(target=importlib.import_module, args=(STORE_MODULE,), daemon=True).start()
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    ended = asyncio.create_task(_parent_gone(config.parent))
    os.set_blocking(1, False)  # a parent that is stopped reads nothing, and the agent does not wait for it
    alive = asyncio.create_task(_tell_alive())
    try:
        _say(f"up {sock.getsockname()[1]}")
        log.info("agent of %s listens on %s:%d", pod.name, pod.host, sock.getsockname()[1])
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = ended.done()
        ended.cancel()
        alive.cancel()
        server.should_exit = True
        await core.close()  # also ends the long polls
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, 5.0)
        sock.close()
    if gone:
        await asyncio.to_thread(_clean_up, config)


async def _tell_alive() -> None:
    while True:
        await asyncio.sleep(ALIVE_SECONDS)
        _say("alive")


async def _parent_gone(parent: int) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    end = asyncio.ensure_future(reader.read())
    while not end.done() and not _is_gone(parent):
        await asyncio.wait({end}, timeout=PARENT_SECONDS)
    end.cancel()


def _is_gone(parent: int) -> bool:
    return os.getppid() != parent


def _clean_up(config: AgentConfig) -> None:
    """The movers unlink their sockets as they leave; what is left after that belongs to nobody."""
    deadline = time.monotonic() + MOVERS_LEAVE_SECONDS
    while any(Path(path).exists() for path in config.movers) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(config.run_dir, ignore_errors=True)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # the parent is gone; the pipe's end is seen elsewhere
        os.write(1, f"{line}\n".encode())


def _read_line() -> bytes:
    """The first line of stdin, without reading past it."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < CONFIG_LIMIT:
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def main() -> int:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s weightsync agent %(levelname)s %(message)s"
    )
    for noisy in ("httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        config = AgentConfig.model_validate_json(_read_line())
    except ValidationError as e:
        _say(f"failed the configuration on stdin is wrong: {e.error_count()} errors")
        return 2
    try:
        asyncio.run(serve(config))
    except (ValueError, OSError, RuntimeError) as e:
        _say(f"failed {type(e).__name__}: {e}".replace("\n", " "))
        log.error("the agent cannot serve: %s", e)
        return 1
    return 0
