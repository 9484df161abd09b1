"""A simulated fleet whose agents run the engine's own session machine; only their movers are make-believe."""

from __future__ import annotations

import secrets
from typing import Any

from tests.unit.control.builders import PLAN, Sim, SimAgent

from weightsync_engine.protocol import session as machine
from weightsync_engine.protocol.messages import (
    Addressed,
    AgentState,
    EpochPhase,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
)
from weightsync_engine.protocol.mover import MoverEpoch, MoverRound, MoverState, MoverTransfer


class RealAgent(SimAgent):
    """Takes the place of `SimAgent`: holds and failures act on the movers and on the flip."""

    def __init__(self, sim: RealSim, state: AgentState) -> None:
        super().__init__(state)
        self.sim, self.template, self.revision = sim, state, 0
        self.movers: dict[int, MoverState] = {}
        self.held: list[tuple[int, MoverTransfer]] = []
        self.flips: list[machine.Flip] = []
        self.holds: list[machine.Hold] = []
        self.standing = False
        """The scheduler stands still."""
        self.running = False
        """Requests that were let in once and never end by themselves."""
        self.torn = False
        """In place: written to since the last flip."""
        self.snapshot: Published | None = None
        self.begin(state.boot_id)

    def begin(self, boot_id: str) -> None:
        trainer, inference = self.template.trainer, self.template.inference
        ranks = trainer.ranks if trainer else ()
        pod = machine.Pod(
            role=self.template.role,
            boot_id=boot_id,
            name=self.template.pod_name,
            uid=None,
            host="10.0.0.1",
            local_ranks=len(ranks) if trainer else inference.workers if inference else 1,
            run_id=trainer.run_id if trainer else "",
            trainer_ranks=ranks,
            trainer_world=trainer.world_size if trainer else 0,
            in_place=inference is not None and inference.in_place,
        )
        self.session = machine.Session(pod=pod)
        self.held, self.flips, self.holds, self.movers = [], [], [], {}
        self.standing = self.running = self.torn = False
        if inference is not None:
            self.see(machine.LiveObserved(None, False))
        for rank in range(pod.local_ranks):
            self.new_mover(rank)

    def new_mover(self, rank: int) -> None:
        self.movers[rank] = MoverState(
            mover_id=secrets.token_hex(8), pid=1, local_rank=rank, snapshot=self.snapshot
        )
        self.see(machine.MoverReported(rank, self.movers[rank]))

    def show(self) -> None:
        self.revision += 1
        self.running = self.running or self.session.guard.open
        self.state = machine.agent_state(self.session, self.revision)

    def see(self, event: machine.Event) -> None:
        self.session, effects = machine.observe(self.session, event, self.sim.now)
        self.show()
        for effect in effects:
            self.act(effect)

    def restart(self) -> None:
        self.generation += 1
        self.begin(f"boot-{self.generation}-of-{self.template.pod_name}")

    def publish(self, published: Published) -> None:
        self.snapshot = published
        for rank in list(self.movers):
            self.mover(rank, snapshot=published)

    def mover(self, rank: int, **fields: Any) -> None:
        self.movers[rank] = self.movers[rank].model_copy(update=fields)
        self.see(machine.MoverReported(rank, self.movers[rank]))

    def time_passes(self, now: float) -> None:
        due = machine.next_deadline(self.session)
        if due is not None and now >= due:
            self.see(machine.TimePassed())

    def take(self, verb: str, request: Addressed) -> None:
        answer = machine.handle(self.session, request, self.sim.now)
        if isinstance(answer, machine.Refused):
            self.sim.refused.append(f"{verb} {self.template.pod_name}: {answer.refusal.reason}")
            return
        self.session = answer.session
        self.show()
        for effect in answer.effects:
            self.act(effect)

    def act(self, effect: machine.Effect) -> None:
        match effect:
            case machine.OpenStore():
                self.see(machine.StoreOpened(effect.epoch, Rendezvous(host="10.0.0.1", port=9)))
            case machine.JoinMover():
                join = effect.message
                problem = self.fail.get("join")
                joined = MoverEpoch(
                    object_uid=join.object_uid,
                    term=join.term,
                    epoch=join.epoch,
                    phase=EpochPhase.FAILED if problem else EpochPhase.JOINED,
                    plan=None if problem else PLAN,
                    problem=problem,
                    reusable=problem is not None and effect.local_rank % 2 == 0,
                )
                self.mover(effect.local_rank, epoch=joined, round=None)
            case machine.StartTransfer():
                if self.session.pod.in_place:
                    assert self.standing, "written to while it generates"
                    self.torn = True
                self.transfer(effect.local_rank, effect.message)
            case machine.KillMovers():
                for rank, mover_id in effect.movers:
                    self.held = [item for item in self.held if item[0] != rank]
                    self.see(machine.MoverLost(rank, mover_id))
                    self.new_mover(rank)
            case machine.LeaveMovers():
                for rank in list(self.movers):
                    self.movers[rank] = self.movers[rank].model_copy(update={"epoch": None, "round": None})
            case machine.Flip():
                self.flips.append(effect)
                if "commit" not in self.hold:
                    self.flip()
            case machine.Hold():
                self.holds.append(effect)
                if "halt" not in self.hold:
                    self.stand()
            case machine.GoOn():
                self.holds, self.standing = [], False
            case machine.EndRequests():
                self.holds, self.standing = [], False
                self.running = self.session.guard.open
                self.see(machine.RequestsEnded(effect.mark, None))
            case machine.AskLive():
                assert not self.held, "asked what is live while it is written to"
                self.see(machine.Settled(effect.epoch, effect.round, self.session.live, self.torn))
            case machine.AskDecision():
                self.ask(effect)
            case _:
                pass

    def transfer(self, rank: int, message: MoverTransfer) -> None:
        problem = self.fail.get("transfer")
        phase = RoundPhase.FAILED if problem else RoundPhase.VERIFIED
        if problem is None and "transfer" in self.hold:
            self.held.append((rank, message))
            phase = RoundPhase.TRANSFERRING
        self.mover(
            rank,
            round=MoverRound(
                epoch=message.epoch,
                round=message.round,
                version=message.version,
                phase=phase,
                bytes_total=100,
                seconds=0.5,
                problem=problem,
            ),
        )

    def flip(self) -> None:
        flip = self.flips.pop(0)
        problem: Problem | None = self.fail.get("flip")
        live = self.session.live if problem else flip.version
        if problem is None:
            self.standing = self.torn = False
        self.see(machine.FlipEnded(flip.epoch, flip.round, problem, live, self.torn))

    def stand(self) -> None:
        hold = self.holds.pop(0)
        problem: Problem | None = self.fail.get("halt")
        self.standing = problem is None
        self.see(machine.HoldEnded(hold.epoch, hold.round, problem))

    @property
    def generates(self) -> bool:
        return not self.standing and (self.running or self.session.guard.open)

    def ask(self, ask: machine.AskDecision) -> None:
        lead = self.sim.agents["trainer-0"]
        assert isinstance(lead, RealAgent)
        verdict: machine.Verdict = "unknown"
        said = (ask.object_uid, ask.epoch, ask.round, "nonce")
        query = machine.DecisionQuery(
            object_uid=ask.object_uid,
            epoch=ask.epoch,
            round=ask.round,
            nonce="nonce",
            signature=machine.sign(ask.key, "ask", *said),
        )
        if "trainer-0" not in self.sim.silent:
            answer = machine.answer_decision(lead.session, query)
            verdict = answer.verdict if answer else "unknown"
        self.see(machine.DecisionLearnt(ask.epoch, ask.round, verdict))

    def release(self) -> None:
        self.hold = frozenset()
        held, self.held = self.held, []
        for rank, message in held:
            self.transfer(rank, message)
        while self.holds:
            self.stand()
        while self.flips:
            self.flip()


class RealSim(Sim):
    def __init__(self, **spec: Any) -> None:
        self.refused: list[str] = []
        self.now = 100.0
        super().__init__(**spec)

    def make(self, state: AgentState) -> SimAgent:
        return RealAgent(self, state)
