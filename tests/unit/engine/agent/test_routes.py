"""The agent's HTTP face, in process: what is answered to whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from tests.integration.agent.tokens import Cluster

from weightsync_engine.agent.core import AgentCore
from weightsync_engine.agent.credentials import TokenVerifier
from weightsync_engine.agent.decision import url
from weightsync_engine.agent.routes import routes
from weightsync_engine.protocol.messages import REQUESTS, AgentState, FlipPolicy, Problem, Rendezvous
from weightsync_engine.protocol.session import Flip, Pod, sign

BOOT, UID, KEY = "boot-0123456789", "uid-1", "k" * 32
SERVER = Pod("inference", BOOT, "vllm-0", "v-uid", "127.0.0.1", 1)
TRAINER = Pod("trainer", BOOT, "trainer-0", "t-uid", "127.0.0.1", 1, "run", (0,), 1)


class FakeServer:
    """A vLLM server as the agent sees one."""

    workers = 1

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.version: str | None = None
        self.torn = False

    async def flip(self, flip: Flip) -> None:
        self.version = flip.version

    held = False

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> None:
        pass

    async def go_on(self) -> None:
        pass

    async def end_requests(self) -> None:
        pass

    async def live(self) -> tuple[str | None, bool]:
        return self.version, self.torn


class Face:
    def __init__(self, core: AgentCore, cluster: Cluster, server: FakeServer | None) -> None:
        self.core, self.server = core, server
        app = Starlette(routes=list(routes(core, TokenVerifier.from_environment(cluster.environment()))))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://agent")
        self.auth = {"Authorization": f"Bearer {cluster.token()}"}

    async def post(self, verb: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        headers = more.pop("headers", self.auth)
        return await self.http.post(f"/weightsync/v1/{verb}", json=body, headers=headers, **more)

    def who(self, **changes: Any) -> dict[str, Any]:
        return {"boot_id": BOOT, "object_uid": UID, "term": 1, **changes}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
async def face(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Face]:
    server = FakeServer()
    core = AgentCore(SERVER, [tmp_path / "mover-0.sock"], server)
    await core.start()
    face = Face(core, cluster, server)
    async with asyncio.timeout(10):
        while not core.session.live_known:  # noqa: ASYNC110
            await asyncio.sleep(0)
    yield face
    await face.http.aclose()
    await core.close()


@pytest.fixture
async def lead(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Face]:
    core = AgentCore(TRAINER, [tmp_path / "mover-0.sock"])
    await core.start()
    yield Face(core, cluster, None)
    await core.close()


async def test_readyz_needs_no_credential_and_says_what_is_waited_for(face: Face) -> None:
    answer = await face.http.get("/readyz")
    assert answer.status_code == 503
    assert "waiting for the operator" in answer.json()["waiting_for"]
    assert (await face.post("admit", face.who(version=None))).status_code == 200
    assert (await face.http.get("/readyz")).status_code == 200


async def test_a_server_with_a_problem_serves_on_but_is_not_ready_and_says_why(face: Face) -> None:
    await face.post("admit", face.who(version=None))
    assert face.server is not None
    face.server.problem = Problem(reason="NoBackend", message="vLLM runs without the backend weightsync")
    answer = await face.http.get("/readyz")
    assert (answer.status_code, face.core.serving) == (503, True)
    assert "without the backend" in answer.json()["waiting_for"]
    state = AgentState.model_validate_json(
        (await face.http.get("/weightsync/v1/state", headers=face.auth)).content
    )
    assert state.problem == face.server.problem
    assert state.inference is not None and "without the backend" in state.inference.closed_because


async def test_a_trainers_agent_is_ready_while_it_lives(lead: Face) -> None:
    assert (await lead.http.get("/readyz")).status_code == 200


async def test_every_route_but_readyz_refuses_without_a_credential(face: Face) -> None:
    # C53
    before = face.core.session
    answers = [await face.http.get("/weightsync/v1/state")]
    answers += [await face.post(verb, face.who(), headers={}) for verb in REQUESTS]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.json()["reason"] == "Unauthorized"
    assert face.core.session == before


async def test_a_refusal_of_the_session_is_409_with_its_reason(face: Face) -> None:
    answer = await face.post("admit", face.who(boot_id="another-process", version=None))
    assert (answer.status_code, answer.json()["reason"]) == (409, "AnotherProcess")


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("admit", b"{"),
        ("admit", b"[]"),
        ("admit", b'{"boot_id": 3}'),
        ("join", b'{"key": "this-is-the-secret"}'),
        ("prepare", b'{"boot_id":"b","object_uid":"u","term":1,"epoch":1,"round":-1,"version":"v"}'),
        ("fence", b'{"boot_id":"b","object_uid":"u","term":1,"problem":{"reason":"x y","message":""}}'),
    ],
)
async def test_a_malformed_request_is_422_and_says_which_field(face: Face, verb: str, body: bytes) -> None:
    answer = await face.http.post(f"/weightsync/v1/{verb}", content=body, headers=face.auth)
    assert (answer.status_code, answer.json()["reason"]) == (422, "Malformed")
    assert answer.json()["message"] and "this-is-the-secret" not in answer.text


async def test_an_unknown_field_is_refused(face: Face) -> None:
    answer = await face.post("admit", face.who(version=None, verison="v1"))
    assert answer.status_code == 422 and "verison" in answer.json()["message"]


async def test_a_body_that_is_too_large_is_refused_whatever_its_length_says(face: Face) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 65536

    told = await face.http.post("/weightsync/v1/admit", content=b"x" * 70000, headers=face.auth)
    untold = await face.http.post("/weightsync/v1/admit", content=endless(), headers=face.auth)
    assert (told.status_code, untold.status_code) == (413, 413)


@pytest.mark.parametrize("query", ["seen=x", "wait=-1", "wait=31", "wait=nan", "wait=soon"])
async def test_a_long_poll_is_bounded(face: Face, query: str) -> None:
    answer = await face.http.get(f"/weightsync/v1/state?{query}", headers=face.auth)
    assert answer.status_code == 422


async def test_a_long_poll_returns_with_the_change(face: Face) -> None:
    seen = face.core.state().revision
    poll = asyncio.create_task(face.http.get(f"/weightsync/v1/state?seen={seen}&wait=30", headers=face.auth))
    await asyncio.sleep(0)
    assert not poll.done()
    await face.post("admit", face.who(version=None))
    state = AgentState.model_validate_json((await asyncio.wait_for(poll, 10)).content)
    assert state.revision > seen and state.inference is not None and state.inference.serving


async def test_a_long_poll_without_change_ends_in_time(face: Face) -> None:
    seen = face.core.state().revision
    answer = await face.http.get(f"/weightsync/v1/state?seen={seen}&wait=0.05", headers=face.auth)
    assert answer.json()["revision"] == seen


def decision(key: str = KEY, round_: int = 1) -> dict[str, Any]:
    signature = sign(key, "ask", UID, 1, round_, "n")
    return {"object_uid": UID, "epoch": 1, "round": round_, "nonce": "n", "signature": signature}


async def test_the_lead_answers_the_decision_to_who_has_the_epochs_key(lead: Face) -> None:
    join = lead.who(
        epoch=1, first_rank=0, world_size=2, trainer_ranks=1, key=KEY,
        lead_agent={"host": "127.0.0.1", "port": 1}, deadline_seconds=30,
    )  # fmt: skip
    assert (await lead.post("join", join)).status_code == 200
    known = await lead.http.get("/weightsync/v1/decision", params=decision())
    assert (known.status_code, known.json()["verdict"]) == (200, "unknown")
    assert (await lead.http.get("/weightsync/v1/decision", params=decision("x" * 32))).status_code == 401
    assert (await lead.http.get("/weightsync/v1/decision", params={"epoch": "x"})).status_code == 422


def test_addresses_become_urls_with_ipv6_in_brackets() -> None:
    assert url(Rendezvous(host="fd00::12", port=1), "/x") == "http://[fd00::12]:1/x"
    assert url(Rendezvous(host="10.1.2.3", port=1), "/x") == "http://10.1.2.3:1/x"


def test_nothing_of_the_environments_proxies_is_used() -> None:
    source = (Path(__file__).parents[4] / "engine/weightsync_engine/agent").glob("*.py")
    for path in source:
        text = path.read_text()
        assert text.count("httpx.AsyncClient(") == text.count("trust_env=False"), path
