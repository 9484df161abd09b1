"""The agent's HTTP routes, for vLLM's own app and for the trainer's agent alike."""

from __future__ import annotations

import asyncio
import logging

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..protocol.messages import REQUESTS, Addressed, AgentState, Refusal
from ..protocol.names import ROUTE_DECISION, ROUTE_PREFIX, ROUTE_READY, ROUTE_STATE
from ..protocol.session import DecisionQuery
from .core import AgentCore, RequestRefused
from .credentials import Unauthorized, Verifier

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_SECONDS = 30.0
BODY_SECONDS = 10.0


class _Answered(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.response = refusal(status, reason, message)


def refusal(status: int, reason: str, message: str) -> Response:
    """A 4xx answer with the body that the protocol promises."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(Refusal(reason=reason, message=message).model_dump(), status, headers)


def _answer(state: AgentState) -> Response:
    return Response(state.model_dump_json(), media_type="application/json")


def routes(core: AgentCore, verifier: Verifier) -> list[Route]:
    """All routes. `/readyz` needs no credential, `GET decision` the epoch's key, all others a token."""

    async def authorized(request: Request) -> None:
        try:
            await verifier.verify(request.headers.get("authorization"))
        except Unauthorized as e:
            client = request.client.host if request.client else "?"
            log.warning("refused %s %s from %s: %s", request.method, request.url.path, client, e)
            raise _Answered(401, "Unauthorized", str(e)) from None

    async def get_state(request: Request) -> Response:
        try:
            await authorized(request)
            seen, wait = _long_poll(request)
            return _answer(await core.wait_state(seen, wait))
        except _Answered as e:
            return e.response

    def poster(model: type[Addressed]) -> Route:
        async def post(request: Request) -> Response:
            try:
                await authorized(request)
                body = await _body(request)
                return _answer(core.post(model.model_validate_json(body)))
            except _Answered as e:
                return e.response
            except ValidationError as e:
                return refusal(422, "Malformed", _where(e))
            except RequestRefused as e:
                return refusal(409, e.refusal.reason, e.refusal.message)

        verb = next(name for name, m in REQUESTS.items() if m is model)
        return Route(ROUTE_PREFIX + verb, post, methods=["POST"])

    async def get_decision(request: Request) -> Response:
        try:
            query = DecisionQuery.model_validate_strings(dict(request.query_params))
        except ValidationError as e:
            return refusal(422, "Malformed", _where(e))
        answer = core.decision(query)
        if answer is None:
            return refusal(401, "Unauthorized", "not signed with the key of that epoch")
        return JSONResponse(answer.model_dump())

    async def ready(request: Request) -> Response:
        if core.ready:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "waiting_for": core.closed_because}, 503)

    return [
        Route(ROUTE_READY, ready, methods=["GET"]),
        Route(ROUTE_STATE, get_state, methods=["GET"]),
        Route(ROUTE_DECISION, get_decision, methods=["GET"]),
        *(poster(model) for model in REQUESTS.values()),
    ]


def _long_poll(request: Request) -> tuple[int | None, float]:
    try:
        seen = int(request.query_params["seen"]) if "seen" in request.query_params else None
        wait = float(request.query_params.get("wait", "0"))
    except ValueError:
        raise _Answered(422, "Malformed", "seen is a whole number, wait a number of seconds") from None
    if not 0 <= wait <= MAX_WAIT_SECONDS:
        raise _Answered(422, "Malformed", f"wait is between 0 and {MAX_WAIT_SECONDS:g} seconds")
    return seen, wait


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    too_large = _Answered(413, "TooLarge", f"a request has at most {MAX_BODY_BYTES} bytes")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except TimeoutError:
        raise _Answered(408, "Timeout", f"the request's body did not come in {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise _Answered(400, "Disconnected", "the request ended in the middle") from None


def _where(error: ValidationError) -> str:
    """Which fields are wrong, without their values: one of them is a key."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    said = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in found[:8])
    return said[:1024]
