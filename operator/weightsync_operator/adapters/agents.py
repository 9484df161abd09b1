"""The agents of one object's pods: a long poll each, and at most one request at a time each."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from pydantic import ValidationError

from weightsync_engine.protocol.messages import AgentState, Refusal
from weightsync_engine.protocol.names import PROTOCOL_VERSION, ROUTE_PREFIX, ROUTE_STATE

from ..core.members import AgentError, AgentFault, AgentView, Pod
from ..core.rounds import Send
from .kube import KubeError, KubeUnavailable
from .tokens import Tokens

_LOG = logging.getLogger(__name__)

POLL_SECONDS = 5.0
"""How long an agent may keep a poll open while nothing changes."""
CALL_SECONDS = 5.0
"""Deadline of every call, on top of the time that a poll may stay open."""
REPEAT_SECONDS = 1.0
"""The same request is not sent again sooner."""
_MAX_BODY = 1 << 20


def session() -> aiohttp.ClientSession:
    """For calls to pods: never through a proxy, and no cap on the open polls."""
    return aiohttp.ClientSession(
        trust_env=False,
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=0),
        timeout=aiohttp.ClientTimeout(total=CALL_SECONDS, connect=3.0),
    )


class _CallFailed(Exception):
    def __init__(self, fault: AgentFault, message: str, protocol: int | None = None) -> None:
        super().__init__(message)
        self.fault: AgentFault = fault
        self.protocol = protocol


class _Refused(Exception):
    pass


class Agents:
    """All agents of one object. `changed` is called whenever something new is known of one."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        tokens: Tokens,
        namespace: str,
        name: str,
        changed: Callable[[], None],
    ) -> None:
        self._http = http
        self._tokens = tokens
        self._object = (namespace, name)
        self._changed = changed
        self._links: dict[str, _Link] = {}

    def track(self, pods: Iterable[Pod]) -> None:
        """Watches the agents of exactly these pods, at their present addresses."""
        wanted = {pod.uid: pod for pod in pods if pod.ip and pod.phase == "Running"}
        for uid in [uid for uid, link in self._links.items() if uid not in wanted]:
            self._links.pop(uid).stop()
        for uid, pod in wanted.items():
            link = self._links.get(uid)
            if link is not None and link.address != (pod.ip, pod.port):
                self._links.pop(uid).stop()
                link = None
            if link is None:
                self._links[uid] = _Link(self, pod)

    def view(self, uid: str) -> AgentView:
        link = self._links.get(uid)
        return link.view if link else AgentView()

    def submit(self, send: Send) -> None:
        """Sends in the background, unless just the same is under way or was sent a moment ago."""
        link = self._links.get(send.uid)
        if link is not None:
            link.submit(send)

    def refresh(self, uid: str) -> None:
        """Asks the agent afresh in the background, whatever the open poll says."""
        link = self._links.get(uid)
        if link is not None:
            link.refresh()

    async def first_words(self, seconds: float) -> None:
        """Waits until each agent has answered or failed once, no longer than `seconds`."""
        waits = [asyncio.create_task(link.heard.wait()) for link in self._links.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            for task in late:
                task.cancel()

    async def settle(self, seconds: float) -> None:
        """Waits for requests under way, no longer than `seconds`."""
        tasks = [link.request for link in self._links.values() if link.request is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    async def close(self) -> None:
        """Ends all tasks."""
        tasks = [task for link in self._links.values() for task in link.stop()]
        self._links.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def call(
        self, link: _Link, method: str, path: str, *, body: str | None = None, patience: float = 0.0
    ) -> AgentState:
        """One HTTP call. Raises _Refused for 409 and 422, _CallFailed for all else that is no state."""
        try:
            token = await self._tokens.get(*self._object)
        except (KubeError, KubeUnavailable) as error:
            raise _CallFailed("unreachable", f"no token for the operator: {error}") from error
        headers = {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._http.request(
                method,
                link.base + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=CALL_SECONDS + patience, connect=3.0),
            ) as answer:
                raw = await answer.content.read(_MAX_BODY)
                while len(raw) < _MAX_BODY and (more := await answer.content.read(_MAX_BODY - len(raw))):
                    raw += more
                status = answer.status
        except TimeoutError as error:
            raise _CallFailed("timeout", f"no answer within {CALL_SECONDS + patience:.0f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _CallFailed("unreachable", _words(error)) from error
        return self._understand(status, raw)

    def _understand(self, status: int, raw: bytes) -> AgentState:
        text = raw.decode(errors="replace")
        if status in (401, 403):
            self._tokens.distrust(*self._object)
            raise _CallFailed("unauthorized", _refusal(raw) or f"HTTP {status}")
        if status in (404, 405):
            raise _CallFailed("missing", f"HTTP {status}")
        if status in (409, 422):
            raise _Refused(_refusal(raw) or text[:200] or f"HTTP {status}")
        if status >= 500:
            raise _CallFailed("unreachable", f"HTTP {status}: {_refusal(raw) or text[:200]}")
        if status != 200:
            raise _CallFailed("missing", f"HTTP {status}")
        return parse_state(raw)

    def notify(self) -> None:
        self._changed()


def parse_state(raw: bytes) -> AgentState:
    """Raises _CallFailed when it is no state of our protocol version."""
    try:
        fields: Any = json.loads(raw)
    except ValueError as error:
        raise _CallFailed("missing", "the answer is no JSON") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("protocol"), int):
        raise _CallFailed("missing", "the answer is no agent's state")
    if fields["protocol"] != PROTOCOL_VERSION:
        raise _CallFailed("protocol", "another protocol version", fields["protocol"])
    try:
        return AgentState.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise _CallFailed("malformed", f"{where}: {first['msg']}") from error


def _refusal(raw: bytes) -> str:
    try:
        refusal = Refusal.model_validate_json(raw)
    except ValidationError:
        return ""
    return f"{refusal.reason}: {refusal.message}"[:500]


def _words(error: BaseException) -> str:
    cause = getattr(error, "os_error", None) or error
    return (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)[:200]


class _Link:
    """One pod's agent."""

    def __init__(self, agents: Agents, pod: Pod) -> None:
        self.agents = agents
        self.pod = pod.name
        self.address = (pod.ip, pod.port)
        self.base = f"http://{_host(pod.ip)}:{pod.port}"
        self.view = AgentView()
        self.heard = asyncio.Event()
        self.request: asyncio.Task[None] | None = None
        self._request_key: tuple[object, ...] = ()
        self._request_at = float("-inf")
        self._noted = ""
        self._refresh: asyncio.Task[None] | None = None
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {pod.name}")

    def stop(self) -> list[asyncio.Task[None]]:
        tasks = [task for task in (self._watcher, self.request, self._refresh) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _watch(self) -> None:
        pause, plain = 0.2, True
        while True:
            state = self.view.state
            poll = "" if plain or state is None else f"?seen={state.revision}&wait={POLL_SECONDS:g}"
            began = time.monotonic()
            try:
                fresh = await self.agents.call(
                    self, "GET", ROUTE_STATE + poll, patience=POLL_SECONDS if poll else 0.0
                )
            except (_CallFailed, _Refused) as error:
                self._failed(error)
                # Another process may answer next, to whom the old revision means nothing.
                plain = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
                continue
            except asyncio.CancelledError:
                raise
            except Exception:
                _LOG.exception("watching pod %s", self.pod)
                await asyncio.sleep(2.0)
                continue
            self._learned(fresh, began)
            pause = 0.2
            if (
                poll
                and fresh.revision == (state.revision if state else None)
                and time.monotonic() - began < 1
            ):
                # An agent that does not hold polls open must not be asked in a tight loop.
                await asyncio.sleep(1.0)
            plain = False

    def submit(self, send: Send) -> None:
        fields = send.request
        key = (
            send.verb,
            *(getattr(fields, name, None) for name in ("term", "epoch", "round", "version", "boot_id")),
        )
        if key == self._request_key:
            if self.request is not None and not self.request.done():
                return
            if time.monotonic() - self._request_at < REPEAT_SECONDS:
                return
        elif self.request is not None:
            self.request.cancel()
        self._request_key, self._request_at = key, time.monotonic()
        self.request = asyncio.create_task(self._post(send), name=f"{send.verb} {self.pod}")

    async def _post(self, send: Send) -> None:
        began = time.monotonic()
        try:
            state = await self.agents.call(
                self, "POST", ROUTE_PREFIX + send.verb, body=send.request.model_dump_json()
            )
        except _Refused as error:
            self._note(logging.WARNING, f"refuses {send.verb}: {error}")
            self.view = AgentView(self.view.state, self.view.asof, self.view.error, f"{send.verb}: {error}")
            # Most likely another process, or a state that we have not seen yet.
            self.refresh()
            return
        except _CallFailed as error:
            self._note(logging.INFO, f"{send.verb}: {error}")
            self._failed(error)
            return
        except asyncio.CancelledError:
            raise
        except Exception:
            _LOG.exception("sending %s to pod %s", send.verb, self.pod)
            return
        self._learned(state, began, refusal="")

    def _note(self, level: int, words: str) -> None:
        """Log what a request came to, once: it is repeated every second for as long as the pod is of no use."""
        if words != self._noted:
            _LOG.log(level, "pod %s: %s", self.pod, words)
        self._noted = words

    def refresh(self) -> None:
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.create_task(self._read(), name=f"read {self.pod}")

    async def _read(self) -> None:
        began = time.monotonic()
        try:
            self._learned(await self.agents.call(self, "GET", ROUTE_STATE), began)
        except (_CallFailed, _Refused) as error:
            self._failed(error)
            return
        # Even an equal state is news here: it is known to be newer.
        self.agents.notify()

    def _learned(self, state: AgentState, began: float, refusal: str | None = None) -> None:
        old = self.view
        self._noted = ""
        if old.state is not None and old.state.boot_id == state.boot_id:
            if state.revision < old.state.revision:
                state = old.state  # an answer that was overtaken
            else:
                began = max(began, old.asof)
        self.view = AgentView(state, max(began, old.asof), None, old.refusal if refusal is None else refusal)
        if (state, old.error, old.refusal) != (old.state, None, self.view.refusal):
            self.agents.notify()

    def _failed(self, error: _CallFailed | _Refused) -> None:
        old = self.view
        fault: AgentFault = error.fault if isinstance(error, _CallFailed) else "malformed"
        protocol = error.protocol if isinstance(error, _CallFailed) else None
        since = old.error.since if old.error is not None else time.monotonic()
        fresh = AgentError(fault, str(error), since, protocol)
        self.view = AgentView(old.state, old.asof, fresh, old.refusal)
        self.heard.set()
        if fresh != old.error:
            self.agents.notify()


def _host(ip: str) -> str:
    try:
        return f"[{ip}]" if ipaddress.ip_address(ip).version == 6 else ip
    except ValueError:
        return ip
