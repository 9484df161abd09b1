"""Servers come and go while the training loop is busy with other things and publishes nothing.

Who is in sync stays Ready and serves on; who comes gets the committed version from the trainer's snapshots and is
Ready only then. What was measured is printed, and kept in `build/e2e/elastic.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from examples.demo.fleet import ROOT, FleetError, wait_until
from tests.e2e import judge
from tests.e2e.matrix import OTHER, STALL_LIMIT, VICTIM
from tests.e2e.world import SERVERS, Longest, Pod, Watch, World, pod_of

JOIN_SECONDS = 5.0
"""From a server's first answer as a member until it is in sync."""
START_SECONDS = 240.0
BUSY_SECONDS = 60.0
FIGURES = ROOT / "build" / "e2e" / "elastic.json"

pytestmark = [pytest.mark.timeout(600), pytest.mark.faults, pytest.mark.slow]


class Busy:
    """A time in which the loop publishes nothing, as all sides saw it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.version = world.go()
        world.wait_all_serve(lambda: self.version, START_SECONDS)
        world.wait_heard(self.version)
        self.began = time.time()
        self.pods = Watch(world.fleet.cluster, world.fleet.namespace, "pods", "-l", "app=vllm")
        self.at_first = {s.name for s in world.servers()}

    def wait_servers(self, count: int) -> list[Pod]:
        """Wait until so many servers are there, all Ready and in sync."""

        def check() -> tuple[list[Pod] | None, object]:
            found = self.world.servers()
            names = [s.name for s in found]
            ok = len(found) == count and self.world.serving(self.version, *names)
            return (found if ok else None), {n: self.world.row(n) for n in names}

        servers = wait_until(f"{count} servers in sync", check, START_SECONDS, every=0.3)
        self.world.aim()
        return servers

    def joined_after(self, name: str) -> float:
        """Seconds from when the object knew a pod as a member until it had it in sync, after the beginning."""
        known = None
        for seen in self.world.history.since(self.began):
            row = next((m for m in seen.status.get("members", ()) if m["pod"] == name), None)
            # Without ranks or a state of its own the row only says why the pod takes no part yet.
            if row is None or row["state"] in ("AgentSilent", "NotRunning", "NoAddress", "Terminating"):
                known = None
            elif known is None:
                known = seen.at
            if known is not None and row and (row["state"], row.get("version")) == ("InSync", self.version):
                return seen.at - known
        raise FleetError(f"{name} never came in sync: {self.world.row(name)}")

    def told(self, name: str) -> str:
        """What the object said of a pod, in seconds from the beginning."""
        said: list[str] = []
        before = None
        for seen in self.world.history.since(self.began):
            row = next((m for m in seen.status.get("members", ()) if m["pod"] == name), {})
            now = (row.get("state", "unknown"), row.get("version"))
            if now != before:
                said.append(f"{seen.at - self.began:.1f} {now[0]} {now[1] or ''}".rstrip())
            before = now
        return f"{name}: " + ", ".join(said)

    def was_ready_throughout(self, name: str) -> bool:
        seen = [pod_of(s.object) for s in self.pods.since(self.began) if s.object["metadata"]["name"] == name]
        return bool(seen) and all(p.ready for p in seen)

    def least_ready(self) -> int:
        """The smallest number of Ready servers at any moment."""
        ready = dict.fromkeys(self.at_first, True)
        least = len(ready)
        for s in self.pods.since(self.began):
            pod = pod_of(s.object)
            ready[pod.name] = pod.ready and "deletionTimestamp" not in s.object["metadata"]
            least = min(least, sum(ready.values()))
        return least

    def check(self) -> Longest:
        """No answer was wrong, no step of the training was held up; the longest ones."""
        world, now = self.world, time.time()
        names = {s.name for s in world.servers()}
        # An answer into which a flip fell is known as one by what the same server says next.
        wait_until(
            "a later answer of every server",
            lambda: (names <= {h.pod for h in world.heard(now)} or None, names),
            20,
        )
        heard = world.heard(self.began)
        assert any(h.service for h in heard)
        wrong = judge.wrong(heard, world.book, world.history.decided(), world.history.finished())
        assert not wrong, "; ".join(wrong[:5])
        longest = world.longest_step(self.began)
        assert longest is not None and longest.stall_ms < 1000 * STALL_LIMIT, longest
        return longest


@pytest.fixture
def busy(world: World) -> Iterator[Busy]:
    busy = Busy(world)
    try:
        yield busy
    finally:
        busy.pods.close()
        level(world)


def level(world: World) -> None:
    """One server on each of the two nodes again."""
    world.fleet.kubectl("scale", "deploy/vllm", f"--replicas={SERVERS}")

    def check() -> tuple[bool | None, object]:
        found = world.servers()
        return (len(found) == SERVERS and all(s.ready for s in found)) or None, found

    wait_until("two servers", check, START_SECONDS)
    found = world.servers()
    if len({s.node for s in found}) == 1:
        world.fleet.kubectl("delete", "pod", found[-1].name, "--wait=true")
        wait_until("two servers", check, START_SECONDS)
    world.aim()


def note(what: str, **figures: object) -> None:
    """For people."""
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    known[what] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **figures}
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(known, indent=1))
    print(f"\n{what}: {figures}")


def test_two_servers_become_four_and_then_one_and_nobody_in_sync_is_disturbed(
    world: World, busy: Busy
) -> None:
    world.fleet.kubectl("scale", "deploy/vllm", "--replicas=4")
    servers = busy.wait_servers(4)
    new = [s.name for s in servers if s.name not in busy.at_first]
    joined = {name: round(busy.joined_after(name), 1) for name in new}
    assert all(busy.was_ready_throughout(name) for name in busy.at_first)
    wait_until(
        "a minute without a publish",
        lambda: (time.time() - busy.began >= BUSY_SECONDS or None, ""),
        BUSY_SECONDS,
    )
    assert world.history.status["decision"]["version"] == busy.version
    world.fleet.kubectl("scale", "deploy/vllm", "--replicas=1")
    [left] = busy.wait_servers(1)
    assert busy.was_ready_throughout(left.name) or left.name in new
    version = world.go()
    wait_until(
        "the next version on the one that is left",
        lambda: (world.serving(version, left.name) or None, ""),
        60,
    )
    longest = busy.check()
    note("2 -> 4 -> 1", joined_s=joined, longest=asdict(longest))
    assert max(joined.values()) <= JOIN_SECONDS, "; ".join(map(busy.told, new))


def test_a_rolling_update_never_leaves_fewer_servers_than_there_were(world: World, busy: Busy) -> None:
    world.fleet.kubectl("rollout", "restart", "deploy/vllm")
    world.fleet.kubectl("rollout", "status", "deploy/vllm", "--timeout=240s", timeout=250)
    servers = busy.wait_servers(SERVERS)
    assert not busy.at_first & {s.name for s in servers}
    joined = {s.name: round(busy.joined_after(s.name), 1) for s in servers}
    longest = busy.check()
    note("rolling update", joined_s=joined, least_ready=busy.least_ready(), longest=asdict(longest))
    assert busy.least_ready() >= SERVERS
    assert max(joined.values()) <= JOIN_SECONDS, f"in sync after joining: {joined}"


def test_the_server_of_a_drained_node_is_replaced_and_the_other_serves_on(world: World, busy: Busy) -> None:
    victim, other = world.server(VICTIM), world.server(OTHER)
    cluster = world.fleet.cluster
    try:
        cluster.kubectl(
            "drain", victim.node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s", timeout=90
        )
        servers = busy.wait_servers(SERVERS)
    finally:
        cluster.kubectl("uncordon", victim.node)
    [new] = [s for s in servers if s.name != other.name]
    assert new.name != victim.name
    assert busy.was_ready_throughout(other.name)
    joined = round(busy.joined_after(new.name), 1)
    note("node drained", joined_s=joined, longest=asdict(busy.check()))
    assert joined <= JOIN_SECONDS


def test_a_container_that_restarts_in_place_comes_back_closed_and_catches_up(
    world: World, busy: Busy
) -> None:
    victim, other = world.server(VICTIM), world.server(OTHER)
    world.nodes.signal("KILL", world.find(victim, "vllm-server"))

    def again() -> tuple[bool | None, object]:
        now = next(s for s in world.servers() if s.name == victim.name)
        return (now.restarts > victim.restarts and now.ready) or None, now

    wait_until("the restarted server Ready", again, START_SECONDS)
    busy.wait_servers(SERVERS)
    assert busy.was_ready_throughout(other.name)
    longest = busy.check()
    world.wait_heard(busy.version)
    note("restarted in place", longest=asdict(longest))


def test_a_deleted_pod_is_replaced_and_its_successor_catches_up(world: World, busy: Busy) -> None:
    victim, other = world.server(VICTIM), world.server(OTHER)
    world.fleet.kubectl("delete", "pod", victim.name, "--wait=true")
    servers = busy.wait_servers(SERVERS)
    [new] = [s for s in servers if s.name != other.name]
    assert busy.was_ready_throughout(other.name)
    joined = round(busy.joined_after(new.name), 1)
    note("pod deleted", joined_s=joined, longest=asdict(busy.check()))
    assert joined <= JOIN_SECONDS
