"""Whole rounds without vLLM: two FSDP2 trainer ranks, two pods of movers, real agents, HTTP and gloo."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.agent.tokens import Cluster
from tests.integration.trainer.ranks import Ranks

pytestmark = pytest.mark.timeout(600)
SERVER_MAIN = Path(__file__).with_name("server_main.py")
ROOT = SERVER_MAIN.parents[3]
UID, KEY = "uid-1", "k" * 40
TPS = (2, 1)


class Pod:
    """One agent, as the operator sees it."""

    def __init__(self, port: int, cluster: Cluster, ranks: int) -> None:
        self.port, self.ranks = port, ranks
        headers = {"Authorization": f"Bearer {cluster.token()}"}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{port}/weightsync/v1/", headers=headers, trust_env=False, timeout=40
        )

    def state(self, **query: Any) -> dict[str, Any]:
        answer = self.http.get("state", params=query)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def post(self, verb: str, **body: Any) -> dict[str, Any]:
        whole = {"boot_id": self.state()["boot_id"], "object_uid": UID, "term": 1, **body}
        answer = self.http.post(verb, json=whole)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def until(self, true: Callable[[dict[str, Any]], Any], seconds: float = 120) -> dict[str, Any]:
        """Long poll until it holds; the state then."""
        deadline = time.monotonic() + seconds
        state = self.state()
        while not true(state):
            assert time.monotonic() < deadline, f"not within {seconds} s; last state: {state}"
            state = self.state(seen=state["revision"], wait=2)
        return state


class FakeServer:
    """The process of `server_main.py`."""

    def __init__(
        self, index: int, tp: int, shapes: Path, tmp: Path, env: dict[str, str], orders: Path | None = None
    ) -> None:
        self.log = tmp / f"server-{index}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER_MAIN), str(shapes), str(tp), str(tmp / f"s{index}")]
                + ([str(orders)] if orders else []),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
                    **env,
                    "WEIGHTSYNC_POD_NAME": f"vllm-{index}",
                },
            )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return dict(json.loads(line))

    def look(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


class Fleet:
    """Trainer and servers, and the operator's part in a round."""

    def __init__(self, ranks: Ranks, servers: list[FakeServer], cluster: Cluster, lead_port: int) -> None:
        self.ranks, self.servers = ranks, servers
        self.lead = Pod(lead_port, cluster, 2)
        self.pods = [Pod(s.read()["port"], cluster, tp) for s, tp in zip(servers, TPS, strict=True)]
        self.all = [self.lead, *self.pods]
        self.epoch = 0
        self.round = 0

    def join(self) -> None:
        self.epoch += 1
        world = sum(p.ranks for p in self.all)
        common = {
            "epoch": self.epoch,
            "world_size": world,
            "trainer_ranks": 2,
            "key": KEY,
            "lead_agent": {"host": "127.0.0.1", "port": self.lead.port},
            "deadline_seconds": 120,
        }
        self.lead.post("join", first_rank=0, **common)
        state = self.lead.until(lambda s: s["epoch"]["rendezvous"] or s["epoch"]["problem"])
        assert state["epoch"]["problem"] is None, state["epoch"]["problem"]
        first = 2
        for pod in self.pods:
            pod.post("join", first_rank=first, rendezvous=state["epoch"]["rendezvous"], **common)
            first += pod.ranks
        for pod in self.all:
            state = pod.until(lambda s: s["epoch"]["phase"] != "Joining")
            assert state["epoch"]["phase"] == "Joined", state["epoch"]["problem"]

    def publish(self, version: str) -> dict[str, str]:
        """The hash of each whole parameter in the wire dtype."""
        self.ranks.say(f"publish {version}")
        bits = self.ranks.read()
        assert bits[0] == bits[1]
        self.lead.until(lambda s: (s["trainer"]["published"] or {}).get("version") == version)
        return dict(bits[0])

    def verify(self, version: str) -> None:
        """A round as far as every pod is verified."""
        self.round += 1
        where = {"epoch": self.epoch, "round": self.round}
        for pod in self.all:
            pod.post("prepare", version=version, deadline_seconds=60, decide_by_seconds=300, **where)
        for pod in self.all:
            pod.until(lambda s: s["round"]["phase"] == "Ready")
        for pod in self.all:
            pod.post("transfer", deadline_seconds=120, **where)
        for pod in self.all:
            state = pod.until(lambda s: s["round"]["phase"] not in ("Ready", "Transferring"))
            assert state["round"]["phase"] == "Verified", state["round"]["problem"]

    def commit(self, version: str) -> None:
        for pod in self.all:
            pod.post("commit", version=version, epoch=self.epoch, round=self.round, deadline_seconds=60)
        for pod in self.all:
            pod.until(lambda s: s["round"]["phase"] == "Committed")

    def wait(self, version: str) -> list[Any]:
        self.ranks.say(f"wait {version}")
        return self.ranks.read()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    tmp = tmp_path_factory.mktemp("fleet")
    cluster = Cluster(tmp)
    env = {**cluster.environment(), "WEIGHTSYNC_POD_IP": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    servers: list[FakeServer] = []
    with Ranks(2, tmp, env) as ranks:
        try:
            up = ranks.run("serve")
            shapes = tmp / "shapes.json"
            shapes.write_text(json.dumps(up[0]["shapes"]))
            servers += [FakeServer(i, tp, shapes, tmp, env) for i, tp in enumerate(TPS)]
            yield Fleet(ranks, servers, cluster, up[0]["port"])
        finally:
            for server in servers:
                server.kill()


def test_two_versions_reach_every_server_bit_for_bit(fleet: Fleet) -> None:
    fleet.join()
    for pod in fleet.pods:
        assert pod.post("admit", version=None)["inference"]["serving"]
    for version in ("step-1", "step-2"):
        bits = fleet.publish(version)
        fleet.verify(version)
        for server in fleet.servers:
            assert server.look()["bits"] != bits  # nothing is live before the commit
        fleet.commit(version)
        for server in fleet.servers:
            assert server.look()["bits"] == bits
        for pod in fleet.pods:
            facts = pod.state()["inference"]
            assert (facts["live_version"], facts["serving"]) == (version, True)
        assert [said["error"] for said in fleet.wait(version)] == ["", ""]


def test_training_after_the_publish_does_not_change_what_arrives(fleet: Fleet) -> None:
    bits = fleet.publish("step-3")
    fleet.ranks.say("train")
    fleet.ranks.read()
    fleet.verify("step-3")
    fleet.commit("step-3")
    assert [s.look()["bits"] == bits for s in fleet.servers] == [True, True]


def test_an_aborted_round_leaves_the_old_weights_and_the_version_can_be_sent_again(fleet: Fleet) -> None:
    before = [s.look() for s in fleet.servers]
    bits = fleet.publish("step-4")
    fleet.verify("step-4")
    problem = {"reason": "Drill", "message": "the test wants it so"}
    for pod in fleet.all:
        pod.post("abort", epoch=fleet.epoch, round=fleet.round, problem=problem)
    assert [s.look() for s in fleet.servers] == before
    fleet.verify("step-4")
    fleet.commit("step-4")
    assert [s.look()["bits"] == bits for s in fleet.servers] == [True, True]


def test_a_killed_mover_is_named_and_the_next_epoch_works(fleet: Fleet) -> None:
    victim = fleet.servers[0].look()["movers"][1]
    os.kill(victim, signal.SIGKILL)
    state = fleet.pods[0].until(lambda s: s["epoch"]["phase"] == "Failed")
    assert state["epoch"]["problem"]["reason"] == "MoverLost"
    assert state["epoch"]["problem"]["rank"] == 3
    assert state["inference"]["serving"]
    bits = fleet.publish("step-5")
    fleet.join()
    fleet.verify("step-5")
    fleet.commit("step-5")
    assert [s.look()["bits"] == bits for s in fleet.servers] == [True, True]


@pytest.mark.parametrize("side", ["trainer", "server"])
def test_a_mover_that_froze_before_a_publish_is_replaced_and_the_version_arrives(
    fleet: Fleet, side: str
) -> None:
    """Nothing was asked of it, so no deadline finds it; a trainer's would never tell of the next version."""
    below = _movers(_pids(fleet)) if side == "trainer" else fleet.servers[0].look()["movers"]
    os.kill(below[0], signal.SIGSTOP)
    try:
        bits = fleet.publish(f"after-{side}")
        fleet.all[0 if side == "trainer" else 1].until(lambda s: s["epoch"]["phase"] == "Failed", 60)
        fleet.join()
        fleet.verify(f"after-{side}")
        fleet.commit(f"after-{side}")
        assert [s.look()["bits"] == bits for s in fleet.servers] == [True, True]
        assert not _cmdline(Path("/proc", str(below[0])))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(below[0], signal.SIGCONT)


def test_a_killed_lead_agent_is_another_process_and_the_next_epoch_works(fleet: Fleet) -> None:
    state = fleet.lead.state()
    (agent,) = [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdecimal() and b"weightsync_engine.agent\0" in _cmdline(p) and _parent(p) in _pids(fleet)
    ]
    os.kill(agent, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            after = fleet.lead.state()
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
    assert after["boot_id"] != state["boot_id"]
    bits = fleet.publish("step-6")
    fleet.join()
    fleet.verify("step-6")
    fleet.commit("step-6")
    assert [s.look()["bits"] == bits for s in fleet.servers] == [True, True]
    assert [said["error"] for said in fleet.wait("step-6")] == ["", ""]


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rsplit(") ", 1)[1].split()[1])
    except OSError:
        return -1


def _movers(parents: set[int]) -> list[int]:
    """Of these processes, those that take part: a spare is called otherwise."""
    return [
        int(p.name)
        for p in Path("/proc").iterdir()
        if p.name.isdecimal()
        and b"weightsync_engine.mover\0" in _cmdline(p)
        and _parent(p) in parents
        and (p / "comm").read_text().startswith("ws-mover")
    ]


def _pids(fleet: Fleet) -> set[int]:
    return {rank.process.pid for rank in fleet.ranks.ranks}
