"""What passes while the agent does not serve, and what never does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from weightsync_engine.vllm.guard import HEADER, Guard, Verdict

GENERATING = [
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
    "/inference/v1/generate", "/pooling", "/generate", "/invocations", "/v1/audio/transcriptions", "/rerank",
    "/anything/a/later/vllm/adds", "/v1/models/../completions", "//v1/completions",
]  # fmt: skip


class Gate:
    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()
        self.answer: Verdict | None = Verdict(False, "waiting for the operator")
        self.routes = Starlette(
            routes=[
                Route("/readyz", lambda _: PlainTextResponse("ours", 503)),
                Route("/weightsync/v1/state", lambda _: PlainTextResponse("ours")),
            ]
        )

    def verdict(self) -> Verdict | None:
        return self.answer


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def client(gate: Gate) -> TestClient:
    async def app(request: Any) -> StreamingResponse:
        return StreamingResponse(iter(["to", "kens"]))

    async def socket(ws: WebSocket) -> None:
        await ws.accept()
        await ws.send_text("token")
        await ws.close()

    inner = Starlette(
        routes=[
            WebSocketRoute("/v1/realtime", socket),
            Route("/{path:path}", app, methods=["GET", "POST", "OPTIONS"]),
        ]
    )
    return TestClient(Guard(inner, lambda: gate))


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_whatever_may_generate_is_refused_with_the_reason_and_a_time(
    client: TestClient, method: str, path: str
) -> None:
    answer = client.request(method, f"http://test{path}")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["message"] == "not serving: waiting for the operator"


@pytest.mark.parametrize(
    "path", ["/health", "/metrics", "/v1/models", "/version", "/ping", "/load", "/openapi.json"]
)
def test_what_generates_nothing_passes_while_closed(client: TestClient, path: str) -> None:
    assert client.get(path).text == "tokens"


def test_our_own_routes_answer_while_closed(client: TestClient) -> None:
    assert (client.get("/readyz").status_code, client.get("/readyz").text) == (503, "ours")
    assert client.get("/weightsync/v1/state").text == "ours"


def test_an_open_guard_lets_through_and_says_the_version(client: TestClient, gate: Gate) -> None:
    gate.answer = Verdict(True, version="step-7")
    answer = client.post("/v1/completions")
    assert (answer.status_code, answer.text, answer.headers[HEADER]) == (200, "tokens", "step-7")


async def test_whoever_answers_a_request_is_known_until_its_last_word_and_can_be_cut_off(gate: Gate) -> None:
    gate.answer = Verdict(True, version="step-7")
    sent: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "path": "/v1/completions", "method": "POST"}
    answering = asyncio.create_task(Guard(app, lambda: gate)(scope, receive, send))
    while not sent:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert gate.running == {answering}
    for task in set(gate.running):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert not gate.running


def test_a_websocket_is_closed_while_the_guard_is(client: TestClient, gate: Gate) -> None:
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/v1/realtime") as ws:
        ws.receive_text()
    gate.answer = Verdict(True, version="step-7")
    with client.websocket_connect("/v1/realtime") as ws:
        assert ws.receive_text() == "token"


def test_a_server_that_has_nothing_to_do_with_weightsync_is_not_guarded(
    client: TestClient, gate: Gate
) -> None:
    gate.answer = None
    answer = client.post("/v1/completions")
    assert answer.text == "tokens"
    assert HEADER not in answer.headers
