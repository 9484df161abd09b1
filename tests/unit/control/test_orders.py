"""Whatever happens in whatever order: the facts come first, nothing is undone, and in the end all are in
sync."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.unit.control.builders import Sim
from tests.unit.control.real_sessions import RealSim

from weightsync_engine.protocol.messages import Problem

VERIFY = ("prepare", "transfer", "commit")
PODS = st.sampled_from(["vllm-0", "vllm-1", "trainer-0"])


class AnyOrder(RuleBasedStateMachine):
    """`Sim` itself asserts, at every step, that nothing is sent before its facts are recorded, that no
    commit goes out without its decision, no decided round is aborted, that terms, epochs and rounds only
    grow, that nobody serves what was never decided, and that a gate opens only for the fleet's version.
    Not as invariants here: one rule takes many steps, in which several versions may be decided."""

    world: type[Sim] = Sim
    sim: Sim
    published = 0

    @initialize()
    def begin(self) -> None:
        self.sim = self.world(
            retry={"backoffSeconds": 1, "maxBackoffSeconds": 2}, deadlines={"commitSeconds": 5}
        )

    @rule(count=st.integers(1, 8), seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def time_passes(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.sim.step(seconds=seconds)

    @rule(lost=st.sets(PODS))
    def some_requests_are_lost(self, lost: set[str]) -> None:
        self.sim.step(deliver=lambda send: send.pod not in lost)

    @rule()
    def a_write_fails(self) -> None:
        self.sim.step(write=False)

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.sim.publish(f"step-{self.published}", self.published)

    @rule(written=st.booleans())
    def the_operator_dies(self, written: bool) -> None:
        decided = self.sim.decide()
        if decided.facts is not None and written:
            self.sim._store(decided.facts)
        self.sim.restart_operator()

    @rule(pod=st.sampled_from(["vllm-0", "vllm-1"]))
    def a_server_restarts(self, pod: str) -> None:
        self.sim.agents[pod].restart()

    @rule(pod=PODS, verb=st.sampled_from(VERIFY))
    def a_pod_gets_slow(self, pod: str, verb: str) -> None:
        self.sim.agents[pod].hold = frozenset({verb})

    @rule(pod=PODS)
    def a_pod_falls_silent(self, pod: str) -> None:
        self.sim.silent.setdefault(pod, self.sim.now)

    @rule(pod=PODS)
    def a_pod_is_itself_again(self, pod: str) -> None:
        self.sim.silent.pop(pod, None)
        self.sim.agents[pod].fail = {}
        self.sim.agents[pod].release()

    @rule(pod=PODS)
    def transfers_fail(self, pod: str) -> None:
        self.sim.agents[pod].fail = {"transfer": Problem(reason="Broken", message="broken", rank=1)}

    def teardown(self) -> None:
        """When the faults end, the newest version arrives everywhere."""
        if not hasattr(self, "sim"):
            return
        for pod in self.sim.agents:
            self.a_pod_is_itself_again(pod)
        self.publish()
        version = f"step-{self.published}"
        self.sim.run(lambda: self.sim.in_sync(version), steps=400, seconds=0.5)


class AnyOrderWithRealSessions(AnyOrder):
    """The same, with the agents' own session machine on the other side."""

    world = RealSim


AnyOrder.TestCase.settings = AnyOrderWithRealSessions.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrderWithRealSessions = AnyOrderWithRealSessions.TestCase
