"""The agent's session machine, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from weightsync_engine.protocol.messages import (
    Abort,
    Addressed,
    Admit,
    Commit,
    EpochPhase,
    Fence,
    FlipPolicy,
    Halt,
    JoinEpoch,
    Leave,
    Prepare,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
    RoundState,
    Transfer,
)
from weightsync_engine.protocol.mover import MoverEpoch, MoverRound, MoverState
from weightsync_engine.protocol.names import PROTOCOL_VERSION
from weightsync_engine.protocol.session import (
    ASK_AGAIN_SECONDS,
    Accepted,
    AskDecision,
    CloseGuard,
    CloseStore,
    DecisionLearnt,
    DecisionQuery,
    Effect,
    EndRequests,
    Event,
    Flip,
    FlipEnded,
    GoOn,
    Hold,
    HoldEnded,
    JoinMover,
    KillMovers,
    LeaveMovers,
    LiveObserved,
    MoverLost,
    MoverReported,
    OpenGuard,
    OpenStore,
    Pod,
    Refused,
    RequestsEnded,
    Session,
    StartTransfer,
    StoreFailed,
    StoreOpened,
    TellOutcome,
    TimePassed,
    agent_state,
    answer_decision,
    handle,
    next_deadline,
    observe,
    sign,
)

BOOT, UID, KEY = "boot-0123456789", "uid-1", "k" * 32
STORE = Rendezvous(host="10.0.0.1", port=4000)
LEAD = Rendezvous(host="10.0.0.1", port=7077)
BROKEN = Problem(reason="Broken", message="because")
E = TypeVar("E")

TRAINER = Pod("trainer", BOOT, "trainer-0", "t-uid", "10.0.0.1", 2, "run", (0, 1), 2)
SERVER = Pod("inference", BOOT, "vllm-0", "v-uid", "10.0.0.2", 2)


class Agent:
    """Drives a session and keeps what it was asked to do."""

    def __init__(self, pod: Pod) -> None:
        self.session = Session(pod)
        self.now = 100.0
        self.effects: list[Effect] = []
        if pod.role == "inference":
            self.see(LiveObserved(None, False))

    def address(self) -> dict[str, Any]:
        return {"boot_id": BOOT, "object_uid": UID, "term": 1}

    def send(self, request: Addressed) -> str:
        """The refusal's reason, or nothing."""
        self.effects = []
        answer = handle(self.session, request, self.now)
        if isinstance(answer, Refused):
            assert answer.refusal.message
            return answer.refusal.reason
        assert isinstance(answer, Accepted)
        self.session, self.effects = answer.session, list(answer.effects)
        return ""

    def see(self, event: Event) -> None:
        self.session, effects = observe(self.session, event, self.now)
        self.effects = list(effects)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.see(TimePassed())

    def did(self, kind: type[E]) -> list[E]:
        return [e for e in self.effects if isinstance(e, kind)]

    def join(self, epoch: int = 1, **changes: Any) -> str:
        trainer = self.session.pod.role == "trainer"
        request = {
            **self.address(), "epoch": epoch, "first_rank": 0 if trainer else 2,
            "world_size": 4, "trainer_ranks": 2,
            "rendezvous": None if trainer else STORE, "key": KEY, "lead_agent": LEAD, "deadline_seconds": 30,
        }  # fmt: skip
        return self.send(JoinEpoch(**{**request, **changes}))

    def prepare(self, round: int = 1, version: str = "v1", epoch: int = 1, **changes: Any) -> str:
        times = {"deadline_seconds": 10, "decide_by_seconds": 60}
        request = {**self.address(), **times, "epoch": epoch, "round": round, "version": version}
        return self.send(Prepare(**{**request, **changes}))

    def transfer(self, round: int = 1, epoch: int = 1, **changes: Any) -> str:
        request = {**self.address(), "epoch": epoch, "round": round, "deadline_seconds": 20}
        return self.send(Transfer(**{**request, **changes}))

    def commit(self, round: int = 1, version: str = "v1", epoch: int = 1, **changes: Any) -> str:
        request = {
            **self.address(),
            "epoch": epoch,
            "round": round,
            "version": version,
            "deadline_seconds": 20,
        }
        return self.send(Commit(**{**request, **changes}))

    def abort(self, round: int = 1, epoch: int = 1, **changes: Any) -> str:
        request = {**self.address(), "epoch": epoch, "round": round, "problem": BROKEN}
        return self.send(Abort(**{**request, **changes}))

    def halt(self, round: int = 1, epoch: int = 1, **changes: Any) -> str:
        request = {**self.address(), "epoch": epoch, "round": round, "deadline_seconds": 8}
        return self.send(Halt(**{**request, **changes}))

    @property
    def halted(self) -> tuple[int, int] | None:
        facts = agent_state(self.session, 1).inference
        return (facts.halted.term, facts.halted.round) if facts is not None and facts.halted else None

    def admit(self, version: str | None, **changes: Any) -> str:
        return self.send(Admit(**{**self.address(), "version": version, **changes}))

    # movers

    def movers(self, ranks: Sequence[int] = (0, 1), **state: Any) -> None:
        """All effects of what these movers say."""
        effects: list[Effect] = []
        for i in ranks:
            said = {"mover_id": f"m{i}", "pid": 1000 + i, "local_rank": i, **state}
            self.see(MoverReported(i, MoverState(**said)))
            effects += self.effects
        self.effects = effects

    def mover_epoch(
        self, phase: EpochPhase, epoch: int = 1, problem: Problem | None = None, reusable: bool = False
    ) -> MoverEpoch:
        return MoverEpoch(
            object_uid=UID, term=1, epoch=epoch, phase=phase, problem=problem, reusable=reusable
        )

    def mover_round(self, phase: RoundPhase, round: int = 1, epoch: int = 1, **more: Any) -> MoverRound:
        return MoverRound(epoch=epoch, round=round, version="v1", phase=phase, bytes_total=100, **more)

    def joined(self, epoch: int = 1, **state: Any) -> None:
        self.movers(epoch=self.mover_epoch(EpochPhase.JOINED, epoch), **state)

    @property
    def phase(self) -> RoundPhase | None:
        return self.session.round.phase if self.session.round else None

    @property
    def epoch_phase(self) -> EpochPhase | None:
        return self.session.epoch.phase if self.session.epoch else None

    def to(self, phase: RoundPhase) -> Agent:
        """Through an epoch and a round of v1, as far as `phase`."""
        trainer = self.session.pod.role == "trainer"
        held: dict[str, Any] = {"snapshot": Published(version="v1", sequence=1)} if trainer else {}
        self.movers(**held)
        assert self.join() == ""
        if trainer:
            self.see(StoreOpened(1, STORE))
        self.joined(**held)
        assert self.prepare() == ""
        if phase is RoundPhase.READY:
            return self
        assert self.transfer() == ""
        if phase is RoundPhase.TRANSFERRING:
            return self
        self.joined(round=self.mover_round(RoundPhase.VERIFIED, bytes_done=100, seconds=0.5), **held)
        assert self.phase is RoundPhase.VERIFIED
        if phase in (RoundPhase.COMMITTING, RoundPhase.COMMITTED):
            assert self.commit() == ""
        if phase is RoundPhase.COMMITTED and not trainer:
            self.see(FlipEnded(1, 1, None, "v1", False))
        return self


@pytest.fixture
def server() -> Agent:
    return Agent(SERVER)


@pytest.fixture
def trainer() -> Agent:
    return Agent(TRAINER)


# ---- who may speak -----------------------------------------------------------------------------------------


def test_a_request_for_another_process_is_refused(server: Agent) -> None:
    assert server.join(boot_id="another-process") == "AnotherProcess"
    assert server.session.epoch is None


def test_an_operator_of_another_protocol_is_told_to_upgrade(server: Agent) -> None:
    assert server.join(protocol=PROTOCOL_VERSION + 1) == "ProtocolMismatch"


def test_a_lower_term_is_refused_and_a_higher_one_accepted(server: Agent) -> None:
    assert server.admit(None, term=5) == ""
    assert server.admit(None, term=4) == "OlderTerm"
    assert server.admit(None, term=6) == ""
    assert server.session.term == 6


def test_a_new_object_resets_the_agent(server: Agent) -> None:
    server.to(RoundPhase.READY)
    assert server.join(epoch=1, object_uid="uid-2", term=1) == ""
    assert server.session.object_uid == "uid-2"
    assert server.session.round is None
    assert LeaveMovers(1) in server.effects


@pytest.mark.parametrize("verb", ["prepare", "transfer", "commit", "abort"])
def test_a_round_of_another_object_is_refused_and_resets_nothing(server: Agent, verb: str) -> None:
    server.to(RoundPhase.READY)
    before = server.session
    assert getattr(server, verb)(object_uid="uid-2") == "AnotherObject"
    assert server.session == before


def test_a_new_object_waits_for_a_running_flip(server: Agent) -> None:
    server.to(RoundPhase.COMMITTING)
    assert server.join(object_uid="uid-2") == "FlipRunning"


# ---- epochs ------------------------------------------------------------------------------------------------


def test_the_lead_opens_the_store_and_joins_its_movers_when_it_listens(trainer: Agent) -> None:
    trainer.movers()
    assert trainer.join() == ""
    assert trainer.did(OpenStore) == [OpenStore(1)]
    assert not trainer.did(JoinMover)
    trainer.see(StoreOpened(1, STORE))
    assert [(j.local_rank, j.message.rank) for j in trainer.did(JoinMover)] == [(0, 0), (1, 1)]
    state = agent_state(trainer.session, 1)
    assert state.epoch is not None and state.epoch.rendezvous == STORE


def test_a_server_joins_its_movers_at_once_with_its_own_ranks(server: Agent) -> None:
    server.movers()
    assert server.join() == ""
    joins = server.did(JoinMover)
    assert [(j.local_rank, j.message.rank) for j in joins] == [(0, 2), (1, 3)]
    assert {j.message.server for j in joins} == {"v-uid"}
    assert {j.message.rendezvous for j in joins} == {STORE}


def test_a_mover_that_comes_late_is_joined_when_it_comes(server: Agent) -> None:
    server.movers(ranks=[0])
    assert server.join() == ""
    assert [j.local_rank for j in server.did(JoinMover)] == [0]
    server.movers(ranks=[1])
    assert [j.local_rank for j in server.did(JoinMover)] == [1]


def test_an_epoch_is_joined_only_when_every_local_mover_is(server: Agent) -> None:
    server.movers()
    server.join()
    server.movers(ranks=[0], epoch=server.mover_epoch(EpochPhase.JOINED))
    assert server.epoch_phase is EpochPhase.JOINING
    server.movers(ranks=[1], epoch=server.mover_epoch(EpochPhase.JOINED))
    assert server.epoch_phase is EpochPhase.JOINED


def test_a_repeated_join_is_answered_as_before(server: Agent) -> None:
    server.movers()
    server.join()
    before = server.session
    assert server.join() == ""
    assert server.effects == [] and server.session == before


def test_a_join_of_the_same_epoch_with_another_key_is_refused(server: Agent) -> None:
    server.join()
    assert server.join(key="x" * 32) == "EpochDiffers"


def test_an_older_epoch_is_refused_also_after_leave(server: Agent) -> None:
    server.join(epoch=3)
    assert server.join(epoch=2) == "OlderEpoch"
    assert server.send(Leave(**server.address(), epoch=3)) == ""
    assert server.join(epoch=3) == "OlderEpoch"
    assert server.join(epoch=4) == ""


def test_a_join_drops_the_older_epoch_and_its_round(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    assert server.join(epoch=2) == ""
    assert server.session.round is None
    assert server.did(LeaveMovers) == [LeaveMovers(1)]
    assert [j.message.epoch for j in server.did(JoinMover)] == [2, 2]


def test_the_lead_closes_the_store_of_the_older_epoch(trainer: Agent) -> None:
    trainer.to(RoundPhase.READY)
    assert trainer.join(epoch=2) == ""
    assert trainer.did(CloseStore) == [CloseStore(1)]
    assert [o.epoch for o in trainer.did(OpenStore)] == [2]


def test_a_store_that_opens_for_a_dropped_epoch_is_closed(trainer: Agent) -> None:
    trainer.join(epoch=1)
    trainer.join(epoch=2)
    trainer.see(StoreOpened(1, STORE))
    assert trainer.effects == [CloseStore(1)]


def test_a_store_that_cannot_open_fails_the_epoch_with_its_reason(trainer: Agent) -> None:
    trainer.join()
    trainer.see(StoreFailed(1, BROKEN))
    assert trainer.session.epoch is not None
    assert (trainer.session.epoch.phase, trainer.session.epoch.problem) == (EpochPhase.FAILED, BROKEN)


def test_movers_in_the_middle_of_a_transfer_are_killed_before_the_next_epoch(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    assert server.join(epoch=2) == ""
    assert server.did(KillMovers)[0].movers == ((0, "m0"), (1, "m1"))
    assert not server.did(JoinMover)
    server.movers()  # what they still say counts for nothing
    assert not server.effects
    for i in (0, 1):
        server.see(MoverLost(i, f"m{i}"))
        server.see(MoverReported(i, MoverState(mover_id=f"n{i}", pid=1, local_rank=i)))
        assert [j.message.epoch for j in server.did(JoinMover)] == [2]


def test_movers_that_a_former_agent_left_in_a_transfer_are_killed(server: Agent) -> None:
    server.joined(epoch=7, round=server.mover_round(RoundPhase.TRANSFERRING, epoch=7))
    assert server.join(epoch=8) == ""
    assert len(server.did(KillMovers)[0].movers) == 2


def test_an_epoch_past_its_deadline_names_the_ranks_without_mover(server: Agent) -> None:
    server.movers(ranks=[0])
    server.join()
    server.wait(31)
    assert server.session.epoch is not None and server.session.epoch.problem is not None
    assert server.session.epoch.phase is EpochPhase.FAILED
    assert server.session.epoch.problem.reason == "JoinTimeout"
    assert "ranks [3] of pod vllm-0 have no mover" in server.session.epoch.problem.message
    assert server.session.epoch.problem.rank == 3
    assert next_deadline(server.session) is None


def test_a_mover_that_fails_to_join_fails_the_epoch_with_its_own_words(server: Agent) -> None:
    server.movers()
    server.join()
    server.movers(ranks=[0], epoch=server.mover_epoch(EpochPhase.FAILED, problem=BROKEN))
    assert server.session.epoch is not None
    assert (server.session.epoch.phase, server.session.epoch.problem) == (EpochPhase.FAILED, BROKEN)
    assert server.did(KillMovers)


def test_movers_that_only_waited_in_the_store_outlive_an_epoch_that_fails_and_join_the_next(
    server: Agent,
) -> None:
    server.movers()
    server.join()
    server.movers(epoch=server.mover_epoch(EpochPhase.JOINING, reusable=True))
    server.movers(epoch=server.mover_epoch(EpochPhase.FAILED, problem=BROKEN, reusable=True))
    server.wait(31)
    assert server.epoch_phase is EpochPhase.FAILED
    assert not server.did(KillMovers)
    assert server.join(epoch=2) == ""
    assert not server.did(KillMovers)
    assert [j.message.epoch for j in server.did(JoinMover)] == [2, 2]


def test_a_mover_that_still_waits_in_the_store_when_the_deadline_passes_is_frozen_and_killed(
    server: Agent,
) -> None:
    server.movers()
    server.join()
    server.movers(epoch=server.mover_epoch(EpochPhase.JOINING, reusable=True))
    server.wait(31)
    assert server.did(KillMovers)[0].movers == ((0, "m0"), (1, "m1"))


def test_of_a_join_that_fails_only_those_are_killed_that_hold_a_communicator_or_say_nothing(
    server: Agent,
) -> None:
    server.movers()
    server.join()
    server.movers(ranks=[1], epoch=server.mover_epoch(EpochPhase.JOINING))
    server.wait(31)
    assert server.did(KillMovers)[0].movers == ((0, "m0"), (1, "m1"))


def test_a_mover_that_came_up_too_late_for_one_epoch_is_there_for_the_next(server: Agent) -> None:
    server.movers(ranks=[0])
    server.join()
    server.movers(ranks=[0], epoch=server.mover_epoch(EpochPhase.JOINING, reusable=True))
    server.wait(29)
    server.movers(ranks=[1])
    assert [j.message.deadline_seconds for j in server.did(JoinMover)] == [pytest.approx(1)]
    server.movers(ranks=[1], epoch=server.mover_epoch(EpochPhase.JOINING, reusable=True))
    server.movers(epoch=server.mover_epoch(EpochPhase.FAILED, problem=BROKEN, reusable=True))
    server.wait(2)
    assert server.epoch_phase is EpochPhase.FAILED
    assert not server.did(KillMovers)
    assert server.join(epoch=2) == ""
    assert [j.message.rank for j in server.did(JoinMover)] == [2, 3]


def test_a_mover_that_comes_up_at_the_last_moment_is_told_of_the_next_epoch_only(server: Agent) -> None:
    server.movers(ranks=[0])
    server.join()
    server.wait(29.8)
    server.movers(ranks=[1])
    assert not server.did(JoinMover)
    server.wait(1)
    assert server.join(epoch=2) == ""
    assert 1 in [j.local_rank for j in server.did(JoinMover)]


def test_a_server_says_that_its_movers_are_starting_until_each_has_been_up_once(server: Agent) -> None:
    def starting() -> bool:
        facts = agent_state(server.session, 1).inference
        assert facts is not None
        return facts.starting

    assert starting()
    server.movers(ranks=[1])
    assert starting()
    server.movers(ranks=[0])
    assert not starting()
    server.see(MoverLost(1, "m1"))
    assert not starting(), "its spare takes over"


def test_a_lost_mover_fails_the_epoch_and_is_named(server: Agent) -> None:
    server.to(RoundPhase.READY)
    server.see(MoverLost(1, "m1"))
    assert server.session.epoch is not None and server.session.epoch.problem is not None
    assert server.session.epoch.phase is EpochPhase.FAILED
    assert server.session.epoch.problem.rank == 3
    assert server.phase is RoundPhase.FAILED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_rank": 3}, "BadRanks"),
        ({"first_rank": 1}, "BadRanks"),
        ({"trainer_ranks": 4}, "BadRanks"),
        ({"rendezvous": None}, "BadRendezvous"),
        ({"rendezvous": Rendezvous(host="0.0.0.0", port=1)}, "BadRendezvous"),
        ({"rendezvous": Rendezvous(host="127.0.0.1", port=1)}, "BadRendezvous"),
        ({"rendezvous": Rendezvous(host="", port=1)}, "BadRendezvous"),
        ({"lead_agent": Rendezvous(host="::", port=1)}, "BadRendezvous"),
    ],
)
def test_ranks_and_addresses_that_cannot_be_are_refused(
    server: Agent, change: dict[str, Any], reason: str
) -> None:
    assert server.join(**change) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_rank": 1}, "BadRanks"),
        ({"trainer_ranks": 3}, "BadRanks"),
        ({"rendezvous": STORE}, "BadRendezvous"),
    ],
)
def test_a_trainer_takes_only_its_own_ranks(trainer: Agent, change: dict[str, Any], reason: str) -> None:
    assert trainer.join(**change) == reason


# ---- rounds ------------------------------------------------------------------------------------------------


def test_a_trainer_is_ready_when_all_its_ranks_hold_the_version(trainer: Agent) -> None:
    trainer.movers()
    trainer.join()
    trainer.see(StoreOpened(1, STORE))
    trainer.joined()
    trainer.prepare()
    assert trainer.phase is RoundPhase.PREPARING
    held = {"snapshot": Published(version="v1", sequence=1), "epoch": trainer.mover_epoch(EpochPhase.JOINED)}
    trainer.movers(ranks=[0], **held)
    assert trainer.phase is RoundPhase.PREPARING
    trainer.movers(ranks=[1], **held)
    assert trainer.phase is RoundPhase.READY
    told = trainer.did(TellOutcome)[0]
    assert (told.local_ranks, told.message.committed, told.message.final) == ((0, 1), False, False)
    assert told.message.problem is None


def test_the_rank_that_misses_the_prepare_deadline_is_named(trainer: Agent) -> None:
    trainer.movers()
    trainer.join()
    trainer.see(StoreOpened(1, STORE))
    trainer.joined()
    trainer.prepare()
    held = {"snapshot": Published(version="v1", sequence=1), "epoch": trainer.mover_epoch(EpochPhase.JOINED)}
    trainer.movers(ranks=[0], **held)
    trainer.wait(11)
    assert trainer.phase is RoundPhase.FAILED
    assert trainer.session.round is not None and trainer.session.round.problem is not None
    assert trainer.session.round.problem.rank == 1
    assert "trainer ranks [1] of pod trainer-0" in trainer.session.round.problem.message
    assert trainer.did(TellOutcome)


def test_a_version_that_a_later_one_replaced_is_unavailable(trainer: Agent) -> None:
    trainer.movers(snapshot=Published(version="v2", sequence=2))
    trainer.join()
    trainer.see(StoreOpened(1, STORE))
    trainer.joined(snapshot=Published(version="v2", sequence=2))
    trainer.prepare(version="v1", sequence=1)
    assert trainer.session.round is not None and trainer.session.round.problem is not None
    assert trainer.session.round.problem.reason == "VersionUnavailable"


def test_a_version_that_is_still_to_come_is_waited_for_whatever_is_held_before_it(trainer: Agent) -> None:
    old = Published(version="v1", sequence=1)
    trainer.movers(snapshot=old)
    trainer.join()
    trainer.see(StoreOpened(1, STORE))
    trainer.joined(snapshot=old)
    trainer.prepare(version="v2", sequence=2)
    assert trainer.phase is RoundPhase.PREPARING
    trainer.movers(snapshot=Published(version="v2", sequence=2), epoch=trainer.mover_epoch(EpochPhase.JOINED))
    assert trainer.phase is RoundPhase.READY


def test_published_is_what_all_ranks_of_the_pod_hold(trainer: Agent) -> None:
    one, two = Published(version="v1", sequence=1), Published(version="v2", sequence=2)
    trainer.movers(ranks=[0], snapshot=one)
    assert trainer.session.published is None
    trainer.movers(ranks=[1], snapshot=one)
    assert trainer.session.published == one
    trainer.movers(ranks=[0], snapshot=two)
    assert trainer.session.published == one
    trainer.movers(ranks=[1], snapshot=two)
    assert trainer.session.published == two


def test_prepare_needs_a_joined_epoch(server: Agent) -> None:
    assert server.prepare() == "UnknownEpoch"
    server.join()
    assert server.prepare() == "EpochNotJoined"
    assert server.prepare(epoch=2) == "UnknownEpoch"


def test_a_repeated_prepare_is_answered_as_before_and_another_version_refused(server: Agent) -> None:
    server.to(RoundPhase.READY)
    assert server.prepare() == "" and server.effects == []
    assert server.prepare(version="v2") == "RoundDiffers"


def test_transfer_starts_every_local_mover_once(server: Agent) -> None:
    server.to(RoundPhase.READY)
    assert server.transfer() == ""
    assert [s.local_rank for s in server.did(StartTransfer)] == [0, 1]
    assert server.transfer() == "" and server.effects == []


def test_a_transfer_that_was_not_prepared_is_refused(server: Agent) -> None:
    server.to(RoundPhase.READY)
    assert server.transfer(round=2) == "UnknownRound"
    server.prepare(round=2)
    assert server.transfer(round=1) == "OlderRound"


def test_what_the_mover_of_rank_0_says_of_the_weights_is_told_once_all_are_verified(trainer: Agent) -> None:
    # C14
    trainer.to(RoundPhase.TRANSFERRING)
    told = {"epoch": trainer.mover_epoch(EpochPhase.JOINED), "snapshot": Published(version="v1", sequence=1)}
    trainer.movers((0,), round=trainer.mover_round(RoundPhase.VERIFIED, content="aa"), **told)
    assert state_of(trainer).content == ""
    trainer.movers((1,), round=trainer.mover_round(RoundPhase.VERIFIED), **told)
    assert (state_of(trainer).phase, state_of(trainer).content) == (RoundPhase.VERIFIED, "aa")


def state_of(agent: Agent) -> RoundState:
    told = agent_state(agent.session, 1).round
    assert told is not None
    return told


def test_progress_of_all_ranks_is_added_up(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    server.joined(round=server.mover_round(RoundPhase.TRANSFERRING, bytes_done=40))
    state = agent_state(server.session, 1)
    assert state.round is not None
    assert (state.round.bytes_done, state.round.bytes_total) == (80, 200)


def test_a_transfer_past_its_deadline_kills_the_movers_and_names_where_they_stood(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    server.movers(
        ranks=[1],
        epoch=server.mover_epoch(EpochPhase.JOINED),
        round=server.mover_round(RoundPhase.TRANSFERRING, step=3, steps=9),
    )
    server.wait(21)
    assert server.phase is RoundPhase.FAILED
    assert server.session.round is not None and server.session.round.problem is not None
    message = server.session.round.problem.message
    assert "rank 2 (pod vllm-0, worker 0) has not begun for 21 s" in message
    assert "rank 3 (pod vllm-0, worker 1) has not finished step 4 of 9 for 21 s" in message
    assert server.session.epoch is not None and server.session.epoch.phase is EpochPhase.FAILED
    assert len(server.did(KillMovers)[0].movers) == 2


def test_a_mover_lost_in_a_transfer_takes_the_others_with_it(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    server.see(MoverLost(0, "m0"))
    assert server.phase is RoundPhase.FAILED
    assert server.did(KillMovers)[0].movers == ((1, "m1"),)


def test_a_transfer_that_fails_by_itself_keeps_the_epoch(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    server.joined(round=server.mover_round(RoundPhase.FAILED, problem=BROKEN))
    assert server.session.round is not None and server.session.epoch is not None
    assert (server.phase, server.session.round.problem) == (RoundPhase.FAILED, BROKEN)
    assert server.session.epoch.phase is EpochPhase.JOINED
    assert server.prepare(round=2) == ""


def test_a_mover_lost_after_verification_loses_nothing(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    server.see(MoverLost(0, "m0"))
    assert server.phase is RoundPhase.VERIFIED
    assert server.commit() == ""
    assert server.did(Flip)


# ---- the decision ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [RoundPhase.READY, RoundPhase.TRANSFERRING])
def test_nothing_is_committed_that_is_not_verified(server: Agent, phase: RoundPhase) -> None:
    server.to(phase)
    assert server.commit() == "NotVerified"
    assert server.effects == []


def test_commit_flips_once_and_is_answered_as_before(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    assert server.commit() == ""
    assert [(f.version, f.deadline_seconds) for f in server.did(Flip)] == [("v1", 20)]
    assert server.commit() == "" and server.effects == []
    server.see(FlipEnded(1, 1, None, "v1", False))
    assert server.phase is RoundPhase.COMMITTED
    assert server.commit() == "" and server.effects == []


def test_a_commit_of_another_version_is_refused(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    assert server.commit(version="v2") == "RoundDiffers"


def test_a_commit_of_a_higher_term_rolls_forward(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    assert server.commit(term=9) == ""
    assert server.did(Flip)


def test_after_the_commit_nothing_is_aborted(server: Agent) -> None:
    server.to(RoundPhase.COMMITTING)
    assert server.abort() == "AlreadyCommitted"
    server.see(FlipEnded(1, 1, None, "v1", False))
    assert server.abort() == "AlreadyCommitted"


def test_an_agent_that_restarted_after_the_flip_says_committed(server: Agent) -> None:
    server.see(LiveObserved("v1", False))
    assert server.commit() == ""
    assert server.phase is RoundPhase.COMMITTED
    assert not server.did(Flip)


def test_an_agent_that_restarted_before_the_flip_refuses(server: Agent) -> None:
    assert server.commit() == "UnknownRound"


def test_a_trainer_agent_that_restarted_and_has_joined_since_still_mirrors_the_decision(
    trainer: Agent,
) -> None:
    trainer.movers()
    assert trainer.join(epoch=5) == ""
    assert trainer.commit(epoch=4) == ""
    assert trainer.session.committed == "v1"
    assert [(t.local_ranks, t.message.committed) for t in trainer.did(TellOutcome)] == [((0, 1), True)]
    assert trainer.session.epoch is not None and trainer.session.epoch.request.epoch == 5
    assert trainer.session.round is None
    # Only once: what comes after is late, and of an older decision.
    assert trainer.commit(epoch=3, version="v0") == "OlderEpoch"
    # Also a mover that was not there at that moment hands it on.
    trainer.see(MoverLost(1, "m1"))
    trainer.movers(ranks=[1], mover_id="m9")
    assert [(t.local_ranks, t.message.version) for t in trainer.did(TellOutcome)] == [((1,), "v1")]


def test_a_trainer_agent_that_restarted_mirrors_the_decision(trainer: Agent) -> None:
    assert trainer.commit() == ""
    assert (trainer.phase, trainer.session.committed) == (RoundPhase.COMMITTED, "v1")
    assert trainer.did(TellOutcome)[0].message.committed


def test_a_trainer_tells_its_training_processes_of_the_commit(trainer: Agent) -> None:
    trainer.to(RoundPhase.VERIFIED)
    assert trainer.commit() == ""
    told = trainer.did(TellOutcome)[0]
    assert (told.local_ranks, told.message.version, told.message.committed) == ((0, 1), "v1", True)
    trainer.see(MoverLost(1, "m1"))
    trainer.see(MoverReported(1, MoverState(mover_id="n1", pid=1, local_rank=1)))
    assert trainer.did(TellOutcome)[0].local_ranks == (1,)  # a mover that died with the word gets it again


def test_a_failed_flip_closes_the_guard_and_is_tried_again(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.COMMITTING)
    server.see(FlipEnded(1, 1, BROKEN, None, False))
    assert server.phase is RoundPhase.COMMITTING
    assert not server.session.guard.open and "decided but is not live" in server.session.guard.because
    assert server.admit(None) == "Committing"
    assert server.commit() == ""
    assert server.did(Flip)
    server.see(FlipEnded(1, 1, None, "v1", False))
    assert server.phase is RoundPhase.COMMITTED
    assert server.admit("v1") == ""


def test_an_aborted_transfer_kills_the_movers_at_once(server: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    assert server.abort() == ""
    assert len(server.did(KillMovers)[0].movers) == 2
    assert server.phase is RoundPhase.ABORTED
    assert server.session.epoch is not None and server.session.epoch.phase is EpochPhase.FAILED


@pytest.mark.parametrize("phase", [RoundPhase.READY, RoundPhase.VERIFIED])
def test_an_abort_outside_of_a_transfer_keeps_the_epoch(server: Agent, phase: RoundPhase) -> None:
    server.to(phase)
    assert server.abort() == ""
    assert server.phase is RoundPhase.ABORTED and not server.did(KillMovers)
    assert server.abort() == "" and server.effects == []
    assert server.commit() == "NotVerified"
    assert server.transfer() == "RoundAborted"
    assert server.prepare(round=2) == ""


def test_an_abort_that_overtakes_its_prepare_wins(server: Agent) -> None:
    server.to(RoundPhase.COMMITTED)
    assert server.abort(round=2) == ""
    assert server.prepare(round=2) == "OlderRound"
    assert server.prepare(round=3) == ""


def test_a_version_that_is_given_up_ends_its_handles(trainer: Agent) -> None:
    trainer.to(RoundPhase.VERIFIED)
    assert trainer.abort() == ""
    assert not trainer.did(TellOutcome)[0].message.final
    assert trainer.abort(final=True) == ""
    assert trainer.did(TellOutcome)[0].message.final


def test_a_pod_without_decision_asks_then_fences_itself_then_asks_again(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.wait(61)
    assert server.did(AskDecision) == [AskDecision(LEAD, UID, 1, 1, KEY)]
    assert server.session.guard.open
    server.see(DecisionLearnt(1, 1, "unknown"))
    assert not server.session.guard.open
    assert server.admit(None) == "Undecided"
    assert next_deadline(server.session) == server.now + ASK_AGAIN_SECONDS
    server.wait(ASK_AGAIN_SECONDS)
    assert server.did(AskDecision)
    assert server.commit() == ""  # the word itself may come at any time
    assert server.did(Flip)


def test_a_learnt_commit_flips(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    server.wait(61)
    server.see(DecisionLearnt(1, 1, "committed"))
    assert [f.version for f in server.did(Flip)] == ["v1"]


def test_a_learnt_abort_leaves_the_old_weights_serving(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.wait(61)
    server.see(DecisionLearnt(1, 1, "aborted"))
    assert server.phase is RoundPhase.ABORTED and server.session.guard.open


def test_a_round_that_nobody_starts_ends_by_itself(server: Agent) -> None:
    server.to(RoundPhase.READY)
    server.wait(61)
    assert server.phase is RoundPhase.FAILED


def query(epoch: int = 1, round: int = 1, key: str = KEY, uid: str = UID) -> DecisionQuery:
    signature = sign(key, "ask", uid, epoch, round, "nonce")
    return DecisionQuery(object_uid=uid, epoch=epoch, round=round, nonce="nonce", signature=signature)


def test_the_lead_answers_what_became_of_a_round(trainer: Agent) -> None:
    trainer.to(RoundPhase.VERIFIED)
    answer = answer_decision(trainer.session, query())
    assert answer is not None and answer.verdict == "unknown"
    trainer.commit()
    answer = answer_decision(trainer.session, query())
    assert answer is not None and answer.verdict == "committed"
    assert answer.signature == sign(KEY, "answer", UID, 1, 1, "nonce", "committed")
    trainer.join(epoch=2, key="2" * 32)
    answer = answer_decision(trainer.session, query())
    assert answer is not None and answer.verdict == "committed"


def test_the_lead_says_aborted_only_of_what_was_aborted(trainer: Agent) -> None:
    trainer.to(RoundPhase.READY)
    trainer.abort()
    answer = answer_decision(trainer.session, query())
    assert answer is not None and answer.verdict == "aborted"
    answer = answer_decision(trainer.session, query(round=2))
    assert answer is not None and answer.verdict == "unknown"


def test_a_question_without_the_epochs_key_is_not_answered(trainer: Agent) -> None:
    trainer.to(RoundPhase.VERIFIED)
    assert answer_decision(trainer.session, query(key="x" * 32)) is None
    assert answer_decision(trainer.session, query(epoch=2)) is None
    assert answer_decision(trainer.session, query(uid="uid-2")) is None


# ---- the guard ---------------------------------------------------------------------------------------------


def test_a_process_starts_closed_and_says_what_it_waits_for() -> None:
    session = Session(SERVER)
    assert not session.guard.open and "waiting for the operator" in session.guard.because


def test_nothing_is_admitted_before_the_workers_were_asked() -> None:
    answer = handle(Session(SERVER), Admit(boot_id=BOOT, object_uid=UID, term=1, version=None), 0)
    assert isinstance(answer, Refused) and answer.refusal.reason == "NotReady"


def test_only_what_is_live_is_admitted(server: Agent) -> None:
    assert server.admit("v1") == "NotLive"
    assert server.admit(None) == ""
    assert server.did(OpenGuard) == [OpenGuard(None)]
    assert server.admit(None) == "" and server.effects == []


def test_torn_weights_close_the_guard_and_are_not_admitted(server: Agent) -> None:
    server.admit(None)
    server.see(LiveObserved(None, True))
    assert server.did(CloseGuard)
    assert server.admit(None) == "Torn"


def test_weights_that_change_outside_of_a_round_close_the_guard(server: Agent) -> None:
    server.admit(None)
    server.see(LiveObserved("by-hand", False))
    assert not server.session.guard.open


def test_serving_never_stops_over_a_flip(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.COMMITTING)
    assert server.session.guard.open
    server.see(FlipEnded(1, 1, None, "v1", False))
    assert server.session.guard.open and server.session.guard.admitted == "v1"
    assert not server.did(CloseGuard)


def test_a_fence_closes_with_its_reason_and_admit_opens_again(server: Agent) -> None:
    server.admit(None)
    assert server.send(Fence(**server.address(), problem=BROKEN)) == ""
    assert server.session.guard.because == "because"
    assert server.admit(None) == ""


def test_leave_goes_on_serving(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.READY)
    assert server.send(Leave(**server.address(), epoch=1)) == ""
    assert server.session.epoch is None and server.session.guard.open


def test_a_trainer_has_no_guard(trainer: Agent) -> None:
    assert trainer.admit("v1") == "WrongRole"
    assert trainer.send(Fence(**trainer.address(), problem=BROKEN)) == "WrongRole"


# ---- the flip's policy, and the barrier ---------------------------------------------------------------------


@pytest.mark.parametrize("learnt", [False, True])
def test_a_flip_follows_the_policy_of_its_prepare_however_its_decision_is_known(
    server: Agent, learnt: bool
) -> None:
    policy = FlipPolicy(requests="wait", prefix_cache="kept")
    server.to(RoundPhase.READY)
    server.abort()
    assert server.prepare(round=2, flip=policy) == ""
    assert server.transfer(round=2) == ""
    server.joined(round=server.mover_round(RoundPhase.VERIFIED, round=2))
    if learnt:
        server.wait(61)
        server.see(DecisionLearnt(1, 2, "committed"))
    else:
        assert server.commit(round=2) == ""
    assert [flip.policy for flip in server.did(Flip)] == [policy]


def test_a_verified_member_halts_until_its_flip_and_says_so_only_once_it_stands_still(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    assert server.halt() == ""
    assert len(server.did(Hold)) == 1
    assert server.halted is None
    assert server.halt() == "" and server.effects == []
    server.see(HoldEnded(1, 1, None))
    assert (server.halted, server.phase, server.session.guard.open) == ((1, 1), RoundPhase.VERIFIED, True)
    assert server.commit() == ""
    server.see(FlipEnded(1, 1, None, "v1", False))
    assert (server.halted, server.phase, server.session.guard.open) == (None, RoundPhase.COMMITTED, True)
    assert server.effects == []  # the flip itself let the scheduler go on
    assert server.halt() == "OlderRound", "a late one stops nobody"


def test_an_abort_lets_a_halted_member_go_on_with_what_it_has(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    server.see(HoldEnded(1, 1, None))
    assert server.abort() == ""
    assert server.did(GoOn) and server.session.guard.open
    assert server.halted is None
    assert server.halt() == "RoundOver"


def test_a_scheduler_that_stops_after_the_round_was_aborted_goes_on(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    server.halt()
    server.abort()
    server.see(HoldEnded(1, 1, None))
    assert server.did(GoOn)


def test_a_member_that_cannot_stop_fails_the_round(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    server.see(HoldEnded(1, 1, BROKEN))
    assert (server.phase, server.session.guard.open, server.halted) == (RoundPhase.FAILED, True, None)
    assert server.session.round is not None and server.session.round.problem == BROKEN


@pytest.mark.parametrize("stopped", [True, False])
def test_a_halted_member_that_hears_nothing_asks_and_then_closes_and_ends_what_runs(
    server: Agent, stopped: bool
) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    if stopped:
        server.see(HoldEnded(1, 1, None))
    due = next_deadline(server.session)
    assert due is not None and due <= server.now + 8, "not as long as a round without a barrier may take"
    server.wait(8)
    assert server.did(AskDecision)
    assert server.session.guard.open
    server.see(DecisionLearnt(1, 1, "unknown"))
    assert server.did(EndRequests) == [EndRequests((1, 1))]
    assert not server.session.guard.open
    server.see(RequestsEnded((1, 1), None))
    assert server.halted == (1, 1)
    assert server.admit(None, after=1) == "Undecided"
    assert server.commit() == "" and server.did(Flip)


def test_a_halted_member_learns_the_decision_from_the_lead(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    server.see(HoldEnded(1, 1, None))
    server.wait(8)
    server.see(DecisionLearnt(1, 1, "aborted"))
    assert server.did(GoOn) and server.session.guard.open


def test_a_flip_that_fails_on_a_halted_member_ends_what_runs(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    server.see(HoldEnded(1, 1, None))
    server.commit()
    server.see(FlipEnded(1, 1, BROKEN, None, False))
    assert server.did(EndRequests) and not server.session.guard.open
    assert server.commit() == "" and server.did(Flip)


def test_an_epoch_waits_until_a_halted_round_is_settled(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    server.halt()
    assert server.join(epoch=2) == "Halted"
    server.wait(8)
    server.see(DecisionLearnt(1, 1, "unknown"))
    assert server.join(epoch=2) == ""
    assert server.session.halt is not None, "no late word may open it for the old weights"


def test_leaving_the_object_lets_a_halted_member_go_on(server: Agent) -> None:
    server.admit(None)
    server.to(RoundPhase.VERIFIED)
    server.halt()
    assert server.send(Leave(**server.address(), epoch=1)) == ""
    assert server.did(GoOn) and server.session.guard.open and server.session.halt is None


def test_a_pod_beside_the_round_closes_ends_what_runs_and_opens_when_the_round_is_over(server: Agent) -> None:
    server.admit(None)
    assert server.halt(round=7, epoch=3) == ""
    assert server.did(CloseGuard) and server.did(EndRequests) == [EndRequests((1, 7))]
    assert server.halted is None
    server.see(RequestsEnded((1, 6), None))
    assert server.halted is None, "what ended was begun for another round"
    server.see(RequestsEnded((1, 7), None))
    assert server.halted == (1, 7)
    assert server.admit(None, after=6) == "Halted", "said before the round was decided"
    assert server.admit(None, after=7) == ""
    assert server.halt(round=7, epoch=3) == "OlderRound", "a late one stops nobody"
    assert server.session.guard.open


def test_the_word_of_a_later_operator_opens_a_pod_that_an_earlier_one_halted(server: Agent) -> None:
    server.admit(None)
    server.halt(round=7, epoch=3)
    assert server.admit(None, term=2, after=0) == ""


def test_requests_that_could_not_be_ended_are_ended_when_asked_again(server: Agent) -> None:
    server.admit(None)
    server.halt(round=7, epoch=3)
    server.see(RequestsEnded((1, 7), BROKEN))
    assert server.halted is None
    assert server.halt(round=7, epoch=3) == ""
    assert server.did(EndRequests)


def test_only_a_verified_member_or_a_pod_beside_the_round_is_halted(server: Agent, trainer: Agent) -> None:
    server.to(RoundPhase.TRANSFERRING)
    assert server.halt() == "NotVerified"
    trainer.to(RoundPhase.VERIFIED)
    assert trainer.halt() == "WrongRole"


def test_no_key_is_in_what_is_printed(server: Agent) -> None:
    server.to(RoundPhase.VERIFIED)
    server.wait(61)
    assert KEY not in repr(server.session) and KEY not in repr(server.effects)
