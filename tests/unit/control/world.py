"""A fleet as bad as it gets, in values: operators that see old answers, a network that loses, doubles and reorders
requests, pods that restart, are replaced or cut off. The agents are real sessions (`real_sessions`).

Every change is checked against what must never break (`World.check`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.unit.control.builders import WALL, inference_state, pod_with, trainer_state
from tests.unit.control.real_sessions import RealAgent, RealSim

from weightsync_engine.protocol import session as machine
from weightsync_engine.protocol.messages import AgentState, Published, RoundPhase
from weightsync_operator.api.types import DecisionFact, Facts, WeightSyncSpec
from weightsync_operator.core.members import AgentError, AgentView, Gate, Pod
from weightsync_operator.core.rounds import Memory, Observed, Send, Settings, plan

Write = Literal["done", "conflict", "lost", "done, but unknown"]
"""How a write of facts ends. `lost`: not done, and the writer cannot tell."""


@dataclass
class Operator:
    """One process. It knows the object and the agents as they were when it last heard of them."""

    name: str
    memory: Memory = field(default_factory=Memory)
    facts: Facts | None = None
    """None: not known for sure; the next thought begins by raising the term."""
    views: dict[str, AgentView] = field(default_factory=dict)
    """By UID of the pod."""


class World:
    def __init__(
        self, servers: int = 2, trainers: int = 1, in_place: frozenset[str] = frozenset(), **spec: Any
    ) -> None:
        """`in_place`: names of servers whose movers write to the live weights."""
        self.spec = WeightSyncSpec.model_validate(spec)
        self.settings = Settings()
        self.now = 100.0
        self.facts = Facts(term=0)
        self.agents: dict[str, RealAgent] = {}
        self.uids: dict[str, str] = {}
        self.cut: set[str] = set()
        """Pods that nobody reaches."""
        self.wire: list[Send] = []
        self.gates: dict[str, Gate] = {}
        self.decided: dict[tuple[int, int], DecisionFact] = {}
        self.operators = [Operator("a")]
        self.published = 0
        self.log: list[str] = []
        self._sim = RealSim(pods=0, trainers=0)
        self._sim.agents = self.agents  # type: ignore[assignment]
        self._sim.silent = _Cut(self.cut)
        self._count = 0
        for index in range(trainers):
            self.add(f"trainer-{index}", trainer_state(f"trainer-{index}", ranks=(index,), world=trainers))
        for index in range(servers):
            state = inference_state(f"vllm-{index}")
            assert state.inference is not None
            facts = state.inference.model_copy(update={"in_place": state.pod_name in in_place})
            self.add(state.pod_name, state.model_copy(update={"inference": facts}))

    # ---- pods ----------------------------------------------------------------------------------------------

    def add(self, name: str, state: AgentState) -> None:
        """A pod, or another one under the name of an old one."""
        self._count += 1
        boot = f"boot-{self._count}-of-{name}"
        self.uids[name] = f"uid-{self._count}-of-{name}"
        self._sim.now = self.now
        self.agents[name] = _Agent(self._sim, self.cut, state.model_copy(update={"boot_id": boot}))

    def restart(self, name: str) -> None:
        """The container, in place: the pod stays, and so does its gate. A trainer begins a new run."""
        self._count += 1
        agent = self.agents[name]
        if agent.template.trainer is not None:
            for other in [a for a in self.agents.values() if a.template.trainer is not None]:
                trainer = other.template.trainer
                assert trainer is not None
                run = trainer.model_copy(update={"run_id": f"run-{self._count}"})
                other.template = other.template.model_copy(update={"trainer": run})
                other.snapshot = None
                self._count += 1
                other.begin(f"boot-{self._count}-of-{other.template.pod_name}")
            return
        agent.begin(f"boot-{self._count}-of-{name}")

    def replace(self, name: str) -> None:
        agent = self.agents[name]
        if agent.template.trainer is not None:
            self.restart(name)
        else:
            self.add(name, agent.template)

    def lose_mover(self, name: str) -> None:
        agent = self.agents[name]
        agent.held = []
        agent.see(machine.MoverLost(0, agent.movers[0].mover_id))
        agent.new_mover(0)

    def publish(self) -> str:
        self.published += 1
        version = f"step-{self.published}"
        for agent in self.agents.values():
            if agent.template.trainer is not None:
                agent.publish(Published(version=version, sequence=self.published))
        return version

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._sim.now = self.now
        for agent in list(self.agents.values()):
            agent.time_passes(self.now)
        self.check()

    # ---- operators -----------------------------------------------------------------------------------------

    def hear(self, operator: Operator, name: str) -> None:
        """The agent's present state reaches the operator, or the want of an answer does."""
        uid = self.uids[name]
        view = operator.views.get(uid, AgentView())
        if name in self.cut:
            error = view.error or AgentError("timeout", "no answer within 5 s", self.now)
            operator.views[uid] = replace(view, error=error)
        else:
            operator.views[uid] = AgentView(self.agents[name].state, self.now)

    def think(self, operator: Operator, write: Write = "done") -> None:
        """One look: `plan`, and what it asks for. As the adapter does it."""
        if operator.facts is None:
            self._begin(operator, write)
        if operator.facts is None:
            return
        pods: list[Pod] = []
        for name, uid in self.uids.items():
            role = self.agents[name].template.role
            view = operator.views.get(uid, AgentView())
            ready = self.agents[name].session.guard.open
            gate = self.gates.get(uid)
            pods.append(pod_with(None, name, role, uid=uid, gate=gate, containers_ready=ready, agent=view))
        observed = Observed(
            uid="object", generation=1, spec=self.spec, facts=operator.facts, pods=tuple(pods), now=self.now,
            wall=WALL, new_key="k" * 64,
        )  # fmt: skip
        decided = plan(operator.memory, observed, self.settings)
        operator.memory = decided.memory
        if decided.facts is not None:
            self._record(operator, decided.facts, write)
            return
        self.wire += decided.sends
        for uid in decided.reads:
            self.hear(operator, next(name for name, known in self.uids.items() if known == uid))
        for change in decided.gates:
            if change.uid in self.uids.values():
                self.gates[change.uid] = Gate(change.status, change.reason)

    def _begin(self, operator: Operator, write: Write) -> None:
        if write != "done":
            if write == "done, but unknown":
                self.facts = self.facts.model_copy(update={"term": self.facts.term + 1})
            return
        self.facts = operator.facts = self.facts.model_copy(update={"term": self.facts.term + 1})
        before = operator.memory
        newest = max([before.next_round - 1, *(round_ for _, round_ in self.decided)])
        operator.memory = replace(Memory(), next_round=newest + 1)
        self.log.append(f"{operator.name} begins term {self.facts.term}")

    def _record(self, operator: Operator, facts: Facts, write: Write) -> None:
        assert operator.facts is not None
        if self.facts != operator.facts:
            operator.facts = None  # somebody else has written
            return
        if write == "conflict":
            return
        if write in ("done", "done, but unknown"):
            self._store(facts)
        operator.facts = facts if write == "done" else None

    def _store(self, facts: Facts) -> None:
        old = self.facts
        assert facts.term == old.term
        if facts.epoch != old.epoch:
            assert facts.epoch is not None
            assert old.epoch is None or facts.epoch.number > old.epoch.number, "numbers of epochs only grow"
        new = facts.decision
        if new is not None and new != old.decision:
            if old.decision is not None and (new.epoch, new.round) != (
                old.decision.epoch,
                old.decision.round,
            ):
                assert old.decision.finished, "a decision is carried out before the next one is taken"
                assert new.round > old.decision.round, "numbers of rounds only grow"
            if (new.epoch, new.round) not in self.decided:
                for member in new.members:
                    self._was_verified(member.pod, member.boot_id, new)
            self.decided[new.epoch, new.round] = new
            self.log.append(f"{'finished' if new.finished else 'decided'} {new.version} (round {new.round})")
        self.facts = facts
        self.check()

    def _was_verified(self, pod: str, boot_id: str, decision: DecisionFact) -> None:
        """Whoever is decided on had everything, unless its process has ended in the meantime."""
        agent = self.agents[pod]
        if agent.session.pod.boot_id != boot_id:
            return
        held = agent.session.round
        assert held is not None and (held.epoch, held.round) == (decision.epoch, decision.round)
        assert held.phase is RoundPhase.VERIFIED, f"{pod} is {held.phase} as its round is decided"

    # ---- the network ---------------------------------------------------------------------------------------

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """One request on its way arrives; it may arrive again if it is kept."""
        send = self.wire[index] if keep else self.wire.pop(index)
        if send.pod in self.cut:
            return
        self.agents[send.pod].take(send.verb, send.request)
        self.check()

    def well(self, seconds: float = 0.1) -> None:
        """A turn in which nothing goes wrong."""
        self.pass_time(seconds)
        for operator in self.operators:
            for name in self.uids:
                self.hear(operator, name)
            self.think(operator)
        while self.wire:
            self.deliver(0)
        if len(self.operators) == 1:
            self._nobody_is_sent_to_old_weights(self.operators[0])

    def _nobody_is_sent_to_old_weights(self, operator: Operator) -> None:
        """After a turn of an operator that knows everything."""
        decision = self.facts.decision
        if decision is None or not decision.finished:
            return  # the operator is still at it, or has only just begun
        if operator.facts != self.facts or operator.memory.round is not None:
            return
        for name, agent in self.agents.items():
            if name not in self.cut and self.ready(name):
                assert agent.session.live == decision.version, f"{name} is Ready with {agent.session.live}"

    def run(self, until: Any, turns: int = 300, seconds: float = 0.5) -> None:
        for _ in range(turns):
            if until():
                return
            self.well(seconds)
        states = {
            n: (a.session.epoch and a.session.epoch.phase, a.session.round) for n, a in self.agents.items()
        }
        raise AssertionError(f"not reached in {turns} turns: {self.log[-20:]}; {self.facts}; {states}")

    # ---- what must never break -----------------------------------------------------------------------------

    def check(self) -> None:
        if self.spec.barrier:
            generate = {n: a.session.live for n, a in self.agents.items() if a.generates}
            assert len(set(generate.values())) <= 1, f"different versions at the same time: {generate}"
        versions = {decision.version for decision in self.decided.values()}
        for name, agent in self.agents.items():
            session = agent.session
            assert session.live is None or session.live in versions, f"{name} holds what was never decided"
            assert not (session.guard.open and session.torn), f"{name} serves torn weights"
            assert not (agent.torn and agent.generates), f"{name} generates with torn weights"
            held = session.round
            if session.guard.open and not (held is not None and held.flipping):
                assert session.guard.admitted == session.live, f"{name} serves other weights than was allowed"
            if held is None:
                continue
            decision = self.decided.get((held.epoch, held.round))
            if held.phase in (RoundPhase.COMMITTING, RoundPhase.COMMITTED):
                assert decision is not None, f"{name} commits a round that was never decided"
                assert decision.version == held.version
            elif decision is not None and session.pod.boot_id in {m.boot_id for m in decision.members}:
                assert held.phase not in machine.FINAL, f"{name} has given up a round that was decided"
            for said in session.decisions:
                decided = (said.epoch, said.round) in self.decided
                assert decided or said.verdict != "committed", f"{name} tells of a commit that never was"
                assert not decided or said.verdict != "aborted", f"{name} tells of the end of a decided round"

    def ready(self, name: str) -> bool:
        """Whether clients are sent there: the gate as the API server has it, and the guard."""
        gate = self.gates.get(self.uids[name])
        return gate is not None and gate.status and self.agents[name].session.guard.open

    def in_sync(self, version: str) -> bool:
        decision = self.facts.decision
        return (
            decision is not None
            and (decision.version, decision.finished) == (version, True)
            and all(
                self.ready(name) and agent.session.live == version
                for name, agent in self.agents.items()
                if agent.template.inference is not None
            )
        )


class _Agent(RealAgent):
    """Reaches the lead only if neither of them is cut off."""

    def __init__(self, sim: RealSim, cut: set[str], state: AgentState) -> None:
        self._cut = cut
        super().__init__(sim, state)

    def ask(self, ask: machine.AskDecision) -> None:
        if self.template.pod_name in self._cut:
            self.see(machine.DecisionLearnt(ask.epoch, ask.round, "unknown"))
        else:
            super().ask(ask)


class _Cut(dict[str, float]):
    """`Sim.silent` by another name: agents ask it whether the lead can be reached."""

    def __init__(self, cut: set[str]) -> None:
        super().__init__()
        self._cut = cut

    def __contains__(self, name: object) -> bool:
        return name in self._cut
