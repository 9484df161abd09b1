"""The trainer pod's agent as the process that it is: real HTTP, real tokens, real ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.agent.tokens import Cluster

from weightsync_engine.agent.config import AgentConfig
from weightsync_engine.agent.decision import ask_decision
from weightsync_engine.agent.supervisor import AgentSupervisor
from weightsync_engine.protocol.messages import Rendezvous
from weightsync_engine.protocol.session import AskDecision

pytestmark = pytest.mark.timeout(600)  # on a busy machine the imports of one process alone may take a minute


def until(true: Callable[[], Any], seconds: float = 30) -> Any:
    """Poll until it holds; what it said then."""
    deadline = time.monotonic() + seconds
    while not (said := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {true}"
        time.sleep(0.02)
    return said


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**cluster.environment(), "WEIGHTSYNC_POD_IP": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    # An agent talks to pods and to the API server directly, whatever the environment says.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")


def config(run_dir: Path, parent: int | None = None, **changes: Any) -> AgentConfig:
    run_dir.mkdir(exist_ok=True)
    return AgentConfig(
        **{
            "parent": parent or os.getpid(),
            "run_id": "run-1",
            "ranks": (0,),
            "world_size": 1,
            "movers": (str(run_dir / "mover-0.sock"),),
            "run_dir": str(run_dir),
            "port": 0,
            **changes,
        }
    )


@pytest.fixture
def agent(environment: None, tmp_path: Path) -> Iterator[AgentSupervisor]:
    supervisor = AgentSupervisor(config(tmp_path / "run"))
    try:
        assert supervisor.wait_up(60) == ""
        yield supervisor
    finally:
        pid = supervisor.pid
        supervisor.close()
        if pid is not None:
            until(lambda: not alive(pid))


class Http:
    def __init__(self, agent: AgentSupervisor, token: str | None) -> None:
        self.base = f"http://127.0.0.1:{agent.port}"
        self.headers = {"Authorization": f"Bearer {token}"} if token is not None else {}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base + path, headers=self.headers, trust_env=False, timeout=10)

    def post(self, verb: str, body: dict[str, Any]) -> httpx.Response:
        url = f"{self.base}/weightsync/v1/{verb}"
        return httpx.post(url, headers=self.headers, json=body, trust_env=False, timeout=10)

    def state(self) -> dict[str, Any]:
        answer = self.get("/weightsync/v1/state")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def join(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "boot_id": state["boot_id"], "object_uid": "uid-1", "term": 1, "epoch": 1, "first_rank": 0,
        "world_size": 2, "trainer_ranks": 1, "key": "k" * 32,
        "lead_agent": {"host": "127.0.0.1", "port": 1}, "deadline_seconds": 60, **changes,
    }  # fmt: skip


def test_it_tells_what_it_is_to_the_operator_only(agent: AgentSupervisor, cluster: Cluster) -> None:
    state = Http(agent, cluster.token()).state()
    assert state["role"] == "trainer"
    assert state["trainer"]["run_id"] == "run-1" and state["trainer"]["ranks"] == [0]
    assert Http(agent, None).get("/readyz").status_code == 200
    for token in (
        None,
        "nonsense",
        cluster.token(aud=["weightsync.dev/rl/other"]),
        cluster.token(sub="system:serviceaccount:rl:default"),
        cluster.token(exp=int(time.time()) - 60),
    ):
        answer = Http(agent, token).get("/weightsync/v1/state")
        assert (answer.status_code, answer.json()["reason"]) == (401, "Unauthorized")


def test_requests_that_do_not_fit_are_409_and_leave_the_agent_as_it_was(
    agent: AgentSupervisor, cluster: Cluster
) -> None:
    http = Http(agent, cluster.token())
    state = http.state()
    for verb, body, reason in (
        ("join", join(state, boot_id="another-process"), "AnotherProcess"),
        ("join", join(state, first_rank=1), "BadRanks"),
        ("transfer", {"epoch": 1, "round": 1, "deadline_seconds": 1}, "UnknownEpoch"),
        ("admit", {"version": None}, "WrongRole"),
    ):
        whole = {"boot_id": state["boot_id"], "object_uid": "uid-1", "term": 1, **body}
        answer = http.post(verb, whole)
        assert (answer.status_code, answer.json()["reason"]) == (409, reason)
    assert http.state()["epoch"] is None
    assert http.post("join", {"nonsense": 1}).status_code == 422


def test_the_lead_opens_the_store_on_the_pods_own_address_alone(
    agent: AgentSupervisor, cluster: Cluster
) -> None:
    http = Http(agent, cluster.token())
    assert http.post("join", join(http.state())).status_code == 200
    where = until(lambda: http.state()["epoch"]["rendezvous"], 60)
    assert where["host"] == "127.0.0.1"
    listeners = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{where['port']:04X}"
    found = [line.split()[1] for line in listeners.splitlines() if port in line and " 0A " in line]
    assert found == [f"0100007F{port}"]
    assert http.post(
        "leave", {"boot_id": http.state()["boot_id"], "object_uid": "uid-1", "term": 1, "epoch": 1}
    )
    until(lambda: port not in [f":{w.split()[1].split(':')[1]}" for w in _listening()])


async def test_a_verified_pod_learns_the_decision_from_the_lead_over_http(
    agent: AgentSupervisor, cluster: Cluster
) -> None:
    http = Http(agent, cluster.token())
    state = http.state()
    assert http.post("join", join(state)).status_code == 200
    assert agent.port is not None
    lead = Rendezvous(host="127.0.0.1", port=agent.port)
    ask = AskDecision(lead, "uid-1", 1, 1, "k" * 32)
    assert await ask_decision(ask, 10) == "unknown"
    abort = {"boot_id": state["boot_id"], "object_uid": "uid-1", "term": 1, "epoch": 1, "round": 1}
    assert http.post("abort", {**abort, "problem": {"reason": "Drill", "message": ""}}).status_code == 200
    assert await ask_decision(ask, 10) == "unknown"  # a round that it never knew: it does not guess
    with pytest.raises(ValueError, match="401"):
        await ask_decision(AskDecision(lead, "uid-1", 1, 1, "x" * 32), 10)


def _listening() -> list[str]:
    return [line for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]


def test_a_killed_agent_is_replaced_at_the_same_address_as_another_process(
    agent: AgentSupervisor, cluster: Cluster
) -> None:
    http = Http(agent, cluster.token())
    before, port, pid = http.state(), agent.port, agent.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: agent.pid not in (None, pid) and agent.wait_up(30) == "", 60)
    assert agent.port == port
    assert http.state()["boot_id"] != before["boot_id"]


def test_an_agent_that_is_told_to_end_does_not_wait_for_an_open_long_poll(
    agent: AgentSupervisor, cluster: Cluster
) -> None:
    http = Http(agent, cluster.token())
    pid = agent.pid
    assert pid is not None
    revision = http.state()["revision"]
    request = (
        f"GET /weightsync/v1/state?seen={revision}&wait=9 HTTP/1.1\r\nHost: agent\r\n"
        f"Authorization: {http.headers['Authorization']}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", agent.port), timeout=10) as poll:
        poll.sendall(request.encode())
        http.state()  # answered after the poll was read
        os.kill(pid, signal.SIGTERM)
        until(lambda: not alive(pid), 1.5)
        assert poll.recv(64).startswith(b"HTTP/1.1 200")


def test_a_frozen_agent_is_replaced_at_the_same_address(agent: AgentSupervisor, cluster: Cluster) -> None:
    before, port, pid = Http(agent, cluster.token()).state(), agent.port, agent.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    until(lambda: agent.pid not in (None, pid) and agent.wait_up(30) == "", 90)
    assert agent.port == port and not alive(pid)
    assert Http(agent, cluster.token()).state()["boot_id"] != before["boot_id"]


def test_it_leaves_with_its_parent_and_removes_the_folder(environment: None, tmp_path: Path) -> None:
    script = (
        "import os,sys,json,time\n"
        "from weightsync_engine.agent.config import AgentConfig\n"
        "from weightsync_engine.agent.supervisor import AgentSupervisor\n"
        "c = AgentConfig.model_validate({**json.loads(sys.argv[1]), 'parent': os.getpid()})\n"
        "s = AgentSupervisor(c)\n"
        "print(s.wait_up(60) or s.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    run_dir = tmp_path / "run"
    said = config(run_dir).model_dump_json()
    parent = subprocess.Popen(
        [sys.executable, "-c", script, said], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.communicate(timeout=10)
    until(lambda: not alive(pid))
    assert not run_dir.exists()


def test_a_port_that_is_taken_is_said_in_words(
    agent: AgentSupervisor, environment: None, tmp_path: Path
) -> None:
    second = AgentSupervisor(config(tmp_path / "second", port=agent.port))
    try:
        assert "ddress already in use" in second.wait_up(60)
    finally:
        second.close()


def test_outside_of_a_cluster_it_says_what_to_set(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTSYNC_JWKS")
    supervisor = AgentSupervisor(config(tmp_path / "run"))
    try:
        assert "WEIGHTSYNC_JWKS" in supervisor.wait_up(60)
    finally:
        supervisor.close()


def test_a_wrong_configuration_ends_it_at_once(environment: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightsync_engine.agent"],
        input=json.dumps({"port": 1}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stdout.startswith("failed ")


def test_no_secret_is_in_the_agents_log(
    environment: None, tmp_path: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = AgentSupervisor(config(tmp_path / "run"))
    try:
        assert supervisor.wait_up(60) == ""
        token = cluster.token()
        http = Http(supervisor, token)
        http.post("join", join(http.state(), key="the-secret-of-the-epoch-0123456789"))
        http.post("join", join(http.state(), key="short-secret"))
        Http(supervisor, token[:-4] + "AAAA").get("/weightsync/v1/state")
        until(lambda: http.state()["epoch"]["rendezvous"], 60)
    finally:
        supervisor.close()
    log = capfd.readouterr().err
    assert "JoinEpoch accepted" in log
    assert "secret" not in log and token not in log and token[:-4] not in log
