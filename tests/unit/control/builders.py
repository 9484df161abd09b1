"""Pods, agents and a small simulated fleet: values only, no I/O."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field, replace
from typing import Any

from weightsync_engine.protocol.messages import (
    Abort,
    Addressed,
    Admit,
    AgentState,
    Commit,
    EpochPhase,
    EpochState,
    Fence,
    Halt,
    Halted,
    InferenceFacts,
    JoinEpoch,
    PlanSummary,
    Prepare,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
    RoundState,
    TrainerFacts,
    Transfer,
)
from weightsync_operator.api.types import Facts, WeightSyncSpec
from weightsync_operator.core.members import AgentError, AgentView, Gate, Pod
from weightsync_operator.core.rounds import Memory, Observed, Plan, Settings, plan

WALL = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
PLAN = PlanSummary(digest="d", parameters=3, direct=3, fallback=0, bytes_total=3000, steps=1)


def trainer_state(
    pod: str = "trainer-0",
    *,
    ranks: tuple[int, ...] = (0,),
    world: int = 1,
    run_id: str = "run-1",
    **fields: Any,
) -> AgentState:
    return AgentState(
        role="trainer",
        boot_id=f"boot-of-{pod}",
        pod_name=pod,
        revision=1,
        trainer=TrainerFacts(run_id=run_id, ranks=ranks, world_size=world, **fields),
    )


def inference_state(pod: str, *, workers: int = 1, **fields: Any) -> AgentState:
    return AgentState(
        role="inference",
        boot_id=f"boot-of-{pod}",
        pod_name=pod,
        revision=1,
        inference=InferenceFacts(workers=workers, **fields),
    )


def pod_with(state: AgentState | None, name: str = "", role: str = "", **fields: Any) -> Pod:
    name = name or (state.pod_name if state else "pod")
    values: dict[str, Any] = {
        "name": name,
        "uid": f"uid-{name}",
        "role": role or (state.role if state else "inference"),
        "phase": "Running",
        "ip": "10.0.0.1",
        "port": 8000,
        "has_gate": True,
        "agent": AgentView(state, asof=0.0),
    }
    return Pod(**{**values, **fields})


@dataclass
class SimAgent:
    """The session of one agent, its movers instant unless told otherwise."""

    state: AgentState
    hold: frozenset[str] = frozenset()
    """Verbs whose effect comes only by `release`."""
    fail: dict[str, Problem] = field(default_factory=dict)
    content: str = ""
    """Of the weights, as the lead says it."""
    alive: bool = True
    term: int = 0
    generation: int = 0

    def update(self, **fields: Any) -> None:
        self.state = self.state.model_copy(update={"revision": self.state.revision + 1, **fields})

    def restart(self) -> None:
        self.generation += 1
        self.term = 0
        fields: dict[str, Any] = {"epoch": None, "round": None}
        if self.state.inference is not None:
            fields["inference"] = InferenceFacts(workers=self.state.inference.workers)
        self.update(boot_id=f"boot-{self.generation}-of-{self.state.pod_name}", **fields)

    def publish(self, published: Published) -> None:
        assert self.state.trainer is not None
        self.update(trainer=self.state.trainer.model_copy(update={"published": published}))

    def time_passes(self, now: float) -> None:
        """Nothing here has a deadline of its own."""

    def take(self, verb: str, request: Addressed) -> None:
        if not self.alive or request.boot_id != self.state.boot_id or request.term < self.term:
            return
        self.term = request.term
        self.state = self.state.model_copy(update={"object_uid": request.object_uid})
        now = self.state.round
        match request:
            case JoinEpoch():
                old = self.state.epoch
                if old is not None and (old.term, old.epoch) >= (request.term, request.epoch):
                    return
                problem = self.fail.get("join")
                lead = request.rendezvous is None
                self.update(
                    epoch=EpochState(
                        term=request.term,
                        epoch=request.epoch,
                        phase=EpochPhase.FAILED if problem else EpochPhase.JOINED,
                        rendezvous=Rendezvous(host="10.0.0.1", port=9) if lead else None,
                        plan=None if problem else PLAN,
                        problem=problem,
                    ),
                    round=None,
                )
            case Prepare():
                epoch = self.state.epoch
                if epoch is None or epoch.epoch != request.epoch or (now and now.round >= request.round):
                    return
                phase = RoundPhase.PREPARING if "prepare" in self.hold else RoundPhase.READY
                self.update(
                    round=RoundState(
                        epoch=request.epoch,
                        round=request.round,
                        version=request.version,
                        phase=phase,
                        bytes_total=100,
                    )
                )
            case Transfer() if self._in(request.epoch, request.round, RoundPhase.READY):
                if problem := self.fail.get("transfer"):
                    self._phase(RoundPhase.FAILED, problem=problem)
                elif "transfer" in self.hold:
                    self._phase(RoundPhase.TRANSFERRING)
                else:
                    self._phase(RoundPhase.VERIFIED, seconds=0.5, content=self.content)
            case Halt() if self.state.inference is not None:
                beside = not self._in(request.epoch, request.round, RoundPhase.VERIFIED)
                if "halt" not in self.hold:
                    self._inference(halted=Halted(term=request.term, round=request.round))
                if beside:
                    self._inference(serving=False)
            case Commit() if self._in(request.epoch, request.round, RoundPhase.VERIFIED):
                if "commit" not in self.hold:
                    self._phase(RoundPhase.COMMITTED)
                    if self.state.inference is not None:
                        self.update(
                            inference=self.state.inference.model_copy(
                                update={"live_version": request.version, "torn": False, "halted": None}
                            )
                        )
                    if self.state.trainer is not None:
                        self.update(
                            trainer=self.state.trainer.model_copy(update={"committed": request.version})
                        )
            case Abort() if now and (now.epoch, now.round) == (request.epoch, request.round):
                if now.phase not in (RoundPhase.COMMITTED, RoundPhase.COMMITTING):
                    self._phase(RoundPhase.ABORTED, problem=request.problem)
                    self._inference(halted=None)
            case Admit() if self.state.inference and self.state.inference.live_version == request.version:
                halted = self.state.inference.halted
                if halted is None or (request.term, request.after) >= (halted.term, halted.round):
                    self._inference(serving=True, halted=None)
            case Fence():
                self._inference(serving=False)
            case _:
                pass

    def release(self) -> None:
        self.hold = frozenset()
        now = self.state.round
        if now is not None and now.phase is RoundPhase.PREPARING:
            self._phase(RoundPhase.READY)
        elif now is not None and now.phase is RoundPhase.TRANSFERRING:
            self._phase(RoundPhase.VERIFIED, seconds=0.5)

    def _in(self, epoch: int, number: int, phase: RoundPhase) -> bool:
        now = self.state.round
        return now is not None and (now.epoch, now.round, now.phase) == (epoch, number, phase)

    def _phase(self, phase: RoundPhase, **fields: Any) -> None:
        assert self.state.round is not None
        self.update(round=self.state.round.model_copy(update={"phase": phase, **fields}))

    def _inference(self, **fields: Any) -> None:
        if self.state.inference is not None:
            self.update(inference=self.state.inference.model_copy(update=fields))


class Sim:
    """A fleet, an API server's facts, and the planner between them. Checks the invariants at every step."""

    def __init__(self, pods: int = 2, trainers: int = 1, **spec: Any) -> None:
        self.spec = WeightSyncSpec.model_validate(spec)
        self.settings = Settings()
        self.agents: dict[str, SimAgent] = {}
        for rank in range(trainers):
            name = f"trainer-{rank}"
            self.agents[name] = self.make(trainer_state(name, ranks=(rank,), world=trainers))
        for index in range(pods):
            self.add(f"vllm-{index}")
        self.gone: set[str] = set()
        self.terminating: set[str] = set()
        self.silent: dict[str, float] = {}
        self.gates: dict[str, Gate] = {}
        self.facts = Facts(term=1)
        self.may_serve: set[str | None] = {None}
        """Every version that was ever decided; a test adds what its pods were given by somebody else."""
        self.memory = Memory()
        self.now = 100.0
        self.log: list[str] = []
        """Facts, requests and reads in the order in which they went out."""
        self.events: list[str] = []
        self.fresh: dict[str, float] = {}
        self.last: Plan | None = None

    def add(self, name: str, **fields: Any) -> SimAgent:
        self.agents[name] = self.make(inference_state(name, **fields))
        return self.agents[name]

    def make(self, state: AgentState) -> SimAgent:
        return SimAgent(state)

    def publish(self, version: str, sequence: int) -> None:
        for agent in self.agents.values():
            if agent.state.trainer is not None:
                agent.publish(Published(version=version, sequence=sequence))

    def observed(self) -> Observed:
        pods = []
        for name, agent in self.agents.items():
            if name in self.gone:
                continue
            error = None
            if name in self.silent:
                error = AgentError("timeout", "no answer within 5 s", self.silent[name])
            pods.append(
                pod_with(
                    agent.state,
                    name,
                    terminating=name in self.terminating,
                    gate=self.gates.get(name),
                    agent=AgentView(agent.state, self.fresh.get(name, 0.0), error),
                )
            )
        return Observed(
            uid="object",
            generation=1,
            spec=self.spec,
            facts=self.facts,
            pods=tuple(pods),
            now=self.now,
            wall=WALL,
            new_key="k" * 64,
        )

    def decide(self) -> Plan:
        """One plan, remembered but not acted on."""
        self.last = plan(self.memory, self.observed(), self.settings)
        self.memory = self.last.memory
        return self.last

    def step(self, *, deliver: Any = lambda send: True, write: bool = True, seconds: float = 0.1) -> Plan:
        """One turn of the loop: `deliver` says which requests arrive, `write` whether facts are stored."""
        self.now += seconds
        for agent in self.agents.values():
            agent.time_passes(self.now)
        decided = self.decide()
        self.events += [f"{note.reason}: {note.message}" for note in decided.events]
        if decided.facts is not None:
            assert not decided.sends, "nothing may be sent before the facts are recorded"
            if write:
                self._store(decided.facts)
            self._check_served()
            return decided
        for send in decided.sends:
            self._check(send.verb, send.request)
            self.log.append(f"{send.verb} {send.pod}")
            if deliver(send) and send.pod not in self.silent and send.pod not in self.gone:
                self.agents[send.pod].take(send.verb, send.request)
        for uid in decided.reads:
            name = uid.removeprefix("uid-")
            self.log.append(f"read {name}")
            if name not in self.silent:
                self.fresh[name] = self.now
        for change in decided.gates:
            self.gates[change.pod] = Gate(change.status, change.reason)
            if change.status and self.facts.decision is not None:
                assert self.live(change.pod) == self.facts.decision.version, "a gate opened too early"
        self._check_served()
        return decided

    def _store(self, facts: Facts) -> None:
        old = self.facts
        assert facts.term == old.term
        if facts.epoch != old.epoch:
            assert facts.epoch is not None
            assert old.epoch is None or facts.epoch.number > old.epoch.number
            self.log.append(f"record epoch {facts.epoch.number}")
        if facts.decision != old.decision:
            assert facts.decision is not None
            if old.decision is not None:
                same = facts.decision.round == old.decision.round
                assert same or (facts.decision.round > old.decision.round and old.decision.finished)
            word = "finished" if facts.decision.finished else "decision"
            self.log.append(f"record {word} {facts.decision.version}")
            self.may_serve.add(facts.decision.version)
        self.facts = facts

    def _check_served(self) -> None:
        for name, agent in self.agents.items():
            if agent.state.role == "inference":
                assert self.live(name) in self.may_serve, f"{name} serves what was never decided"

    def _check(self, verb: str, request: Addressed) -> None:
        assert request.term == self.facts.term
        if isinstance(request, JoinEpoch):
            assert self.facts.epoch is not None
            assert request.epoch == self.facts.epoch.number
        if isinstance(request, Commit):
            decision = self.facts.decision
            assert decision is not None, "a commit without a decision"
            assert (request.epoch, request.round, request.version) == (
                decision.epoch,
                decision.round,
                decision.version,
            )
        if isinstance(request, Abort):
            decision = self.facts.decision
            assert decision is None or (request.epoch, request.round) != (decision.epoch, decision.round)

    def run(self, until: Any, steps: int = 200, **how: Any) -> None:
        for _ in range(steps):
            if until():
                return
            self.step(**how)
        raise AssertionError(f"not reached in {steps} steps: {self.log[-20:]}; {self.memory}")

    def restart_operator(self) -> None:
        """Another process: it knows what is recorded, and raises the term."""
        self.memory = Memory()
        self.facts = self.facts.model_copy(update={"term": self.facts.term + 1})

    def live(self, pod: str) -> str | None:
        facts = self.agents[pod].state.inference
        assert facts is not None
        return facts.live_version

    def serving(self, pod: str) -> bool:
        facts = self.agents[pod].state.inference
        assert facts is not None
        return facts.serving

    def committed(self, version: str) -> bool:
        decision = self.facts.decision
        return decision is not None and decision.version == version and decision.finished

    def in_sync(self, version: str) -> bool:
        return (
            self.committed(version)
            and self.memory.round is None
            and all(
                self.live(name) == version and self.serving(name)
                for name, agent in self.agents.items()
                if agent.state.role == "inference" and name not in self.gone
            )
        )


__all__ = ["PLAN", "WALL", "Sim", "SimAgent", "inference_state", "pod_with", "replace", "trainer_state"]
