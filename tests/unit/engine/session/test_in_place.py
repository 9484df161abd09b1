"""A server whose movers write to the live weights: it stands still for the transfer, and what a failure leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.engine.session.test_session import BROKEN, LEAD, SERVER, Agent

from weightsync_engine.protocol.messages import EpochPhase, FlipPolicy, InferenceFacts, Leave, RoundPhase
from weightsync_engine.protocol.mover import MoverState
from weightsync_engine.protocol.session import (
    SETTLE_SECONDS,
    STANDING_SECONDS,
    AskDecision,
    AskLive,
    CloseGuard,
    DecisionLearnt,
    EndRequests,
    Flip,
    FlipEnded,
    GoOn,
    Hold,
    HoldEnded,
    KillMovers,
    LiveObserved,
    MoverLost,
    MoverReported,
    OpenGuard,
    Settled,
    StartTransfer,
    agent_state,
)

READY, TRANSFERRING, VERIFIED = RoundPhase.READY, RoundPhase.TRANSFERRING, RoundPhase.VERIFIED


class InPlaceAgent(Agent):
    """It serves what it has loaded."""

    def __init__(self) -> None:
        super().__init__(replace(SERVER, in_place=True))
        assert self.admit(None) == ""

    def to(self, phase: RoundPhase) -> InPlaceAgent:
        self.movers()
        assert self.join() == ""
        self.joined()
        assert self.prepare() == ""
        if phase is RoundPhase.PREPARING:
            return self
        self.see(HoldEnded(1, 1, None))
        if phase is READY:
            return self
        assert self.transfer() == ""
        if phase is TRANSFERRING:
            return self
        self.joined(round=self.mover_round(VERIFIED, bytes_done=100, seconds=0.5))
        assert self.phase is VERIFIED
        return self

    @property
    def facts(self) -> InferenceFacts:
        facts = agent_state(self.session, 1).inference
        assert facts is not None
        return facts

    def both_lost(self) -> None:
        """The movers that were killed are gone."""
        effects = []
        for i in (0, 1):
            self.see(MoverLost(i, f"m{i}"))
            effects += self.effects
        self.effects = effects


@pytest.fixture
def pod() -> InPlaceAgent:
    return InPlaceAgent()


# ---- the way of a round ------------------------------------------------------------------------------------


def test_the_scheduler_stands_still_before_the_pod_is_ready_for_a_transfer(pod: InPlaceAgent) -> None:
    pod.to(RoundPhase.PREPARING)
    assert pod.did(Hold) == [Hold(1, 1, FlipPolicy(), 5)]
    assert pod.transfer() == "NotReady"
    pod.see(HoldEnded(1, 1, None))
    assert pod.phase is READY
    assert pod.transfer() == ""
    assert len(pod.did(StartTransfer)) == 2


def test_running_requests_are_treated_as_the_rounds_policy_says(pod: InPlaceAgent) -> None:
    pod.movers()
    pod.join()
    pod.joined()
    pod.prepare(flip=FlipPolicy(requests="abort"))
    assert pod.did(Hold)[0].policy.requests == "abort"


def test_a_scheduler_that_cannot_stop_fails_the_round_and_changes_nothing(pod: InPlaceAgent) -> None:
    pod.to(RoundPhase.PREPARING)
    pod.see(HoldEnded(1, 1, BROKEN))
    assert pod.session.round is not None
    assert (pod.phase, pod.session.round.problem) == (RoundPhase.FAILED, BROKEN)
    assert pod.epoch_phase is EpochPhase.JOINED
    assert pod.effects == []
    assert pod.facts.serving
    assert pod.prepare(round=2) == ""


def test_while_the_weights_are_written_the_pod_is_neither_torn_nor_closed(pod: InPlaceAgent) -> None:
    for phase in (TRANSFERRING, VERIFIED):
        pod = InPlaceAgent().to(phase)
        pod.see(LiveObserved(None, True))
        assert pod.effects == []
        assert (pod.facts.torn, pod.facts.serving, pod.facts.in_place) == (False, True, True)


def test_the_flip_names_what_was_written_and_serving_goes_on(pod: InPlaceAgent) -> None:
    pod.to(VERIFIED)
    assert pod.commit() == ""
    assert [f.version for f in pod.did(Flip)] == ["v1"]
    pod.see(LiveObserved(None, True))
    pod.see(FlipEnded(1, 1, None, "v1", False))
    assert pod.phase is RoundPhase.COMMITTED
    assert pod.effects == []
    assert (pod.facts.live_version, pod.facts.torn, pod.facts.serving) == ("v1", False, True)
    assert pod.session.unsettled is None


def test_a_flip_that_fails_closes_ends_what_runs_and_is_tried_again(pod: InPlaceAgent) -> None:
    pod.to(VERIFIED)
    pod.commit()
    pod.see(FlipEnded(1, 1, BROKEN, None, True))
    assert pod.did(EndRequests)
    assert pod.facts.torn
    assert not pod.facts.serving
    assert pod.commit() == ""
    pod.see(FlipEnded(1, 1, None, "v1", False))
    assert pod.phase is RoundPhase.COMMITTED
    assert pod.admit("v1") == ""


def test_a_barrier_finds_the_pod_halted_already(pod: InPlaceAgent) -> None:
    pod.to(VERIFIED)
    assert pod.halt() == ""
    assert pod.effects == []
    assert pod.halted == (1, 1)


def test_a_scheduler_that_is_still_held_after_a_flip_that_failed_late_goes_on(pod: InPlaceAgent) -> None:
    pod.to(VERIFIED)
    pod.commit()
    pod.see(FlipEnded(1, 1, BROKEN, "v1", False))
    assert pod.phase is RoundPhase.COMMITTED
    assert pod.did(GoOn) == [GoOn()]


# ---- before anything is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [RoundPhase.PREPARING, READY])
def test_an_abort_before_the_transfer_lets_the_scheduler_go_on(pod: InPlaceAgent, phase: RoundPhase) -> None:
    pod.to(phase)
    assert pod.abort() == ""
    assert pod.effects == [GoOn()]
    assert pod.facts.serving
    assert pod.admit(None) == ""


def test_a_transfer_that_never_comes_is_not_waited_for(pod: InPlaceAgent) -> None:
    pod.to(READY)
    pod.wait(10 + STANDING_SECONDS - 1)
    assert pod.phase is READY
    pod.wait(1)
    assert (pod.phase, pod.effects) == (RoundPhase.FAILED, [GoOn()])


def test_a_scheduler_that_says_nothing_is_not_waited_for(pod: InPlaceAgent) -> None:
    pod.to(RoundPhase.PREPARING)
    pod.wait(10)
    assert pod.session.round is not None and pod.session.round.problem is not None
    assert (pod.phase, pod.session.round.problem.reason) == (RoundPhase.FAILED, "HaltTimeout")
    assert pod.did(GoOn)
    pod.see(HoldEnded(1, 1, None))
    assert pod.did(GoOn), "it stopped after all"


def test_a_later_round_that_is_prepared_first_lets_go_and_stops_anew(pod: InPlaceAgent) -> None:
    pod.to(READY)
    assert pod.prepare(round=2) == ""
    assert [type(e) for e in pod.effects] == [GoOn, Hold]


def test_another_epoch_waits_until_the_round_is_settled(pod: InPlaceAgent) -> None:
    for phase in (RoundPhase.PREPARING, READY, TRANSFERRING, VERIFIED):
        assert InPlaceAgent().to(phase).join(epoch=2) == "Halted"


# ---- once something is written -----------------------------------------------------------------------------


def fails(pod: InPlaceAgent, how: str) -> None:
    """A transfer that was under way ends without its verdict; the movers are gone or done by then."""
    pod.to(VERIFIED if how.startswith("verified") else TRANSFERRING)
    if how in ("aborted", "verified, aborted"):
        assert pod.abort() == ""
    elif how == "a mover is lost":
        pod.see(MoverLost(0, "m0"))
    elif how == "late":
        pod.wait(20)
    elif how == "the object is left":
        assert pod.send(Leave(**pod.address(), epoch=1)) == ""
    elif how == "a mover's epoch fails":
        failed = pod.mover_epoch(EpochPhase.FAILED, problem=BROKEN)
        pod.movers([0], epoch=failed, round=pod.mover_round(RoundPhase.FAILED, problem=BROKEN))
    elif how == "all agree that it failed":
        pod.joined(round=pod.mover_round(RoundPhase.FAILED, problem=BROKEN))
        return
    elif how == "verified, learnt to be aborted":
        pod.wait(60)
        pod.see(DecisionLearnt(1, 1, "aborted"))
    if not how.startswith("verified"):
        assert not pod.did(AskLive), "movers may still write"
        assert not pod.did(GoOn)
        pod.both_lost()


WAYS = [
    "aborted", "a mover is lost", "late", "the object is left", "a mover's epoch fails", "all agree that it failed",
    "verified, aborted", "verified, learnt to be aborted",
]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_what_a_failed_transfer_left_is_asked_once_nobody_writes_any_more(
    pod: InPlaceAgent, how: str
) -> None:
    fails(pod, how)
    assert pod.did(AskLive) == [AskLive(1, 1)]
    assert not pod.did(GoOn), "not a token before it is known"
    assert pod.admit(None) == "Unsettled"


@pytest.mark.parametrize("how", WAYS)
def test_a_torn_pod_closes_ends_what_runs_and_names_the_cause(pod: InPlaceAgent, how: str) -> None:
    fails(pod, how)
    pod.see(Settled(1, 1, None, True))
    assert [type(e) for e in pod.effects] == [CloseGuard, EndRequests]
    assert (pod.facts.torn, pod.facts.serving) == (True, False)
    assert "of no one version: a whole round must succeed first (" in pod.facts.closed_because or how in (
        "the object is left"
    )
    assert pod.admit(None) == "Torn"
    said = pod.facts.closed_because
    pod.see(LiveObserved(None, True))
    assert pod.facts.closed_because == said, "the cause stays told"


@pytest.mark.parametrize("how", WAYS)
def test_a_pod_that_nobody_has_written_to_goes_on_with_what_it_has(pod: InPlaceAgent, how: str) -> None:
    fails(pod, how)
    pod.see(Settled(1, 1, None, False))
    assert pod.effects == [GoOn()]
    assert (pod.facts.torn, pod.facts.serving) == (False, True)


def test_a_torn_pod_is_mended_by_the_next_whole_round(pod: InPlaceAgent) -> None:
    fails(pod, "all agree that it failed")
    assert pod.prepare(round=2) == "Unsettled"
    pod.see(Settled(1, 1, None, True))
    assert pod.prepare(round=2) == ""
    pod.see(HoldEnded(1, 2, None))
    assert pod.transfer(round=2) == ""
    pod.joined(round=pod.mover_round(VERIFIED, round=2))
    assert pod.commit(round=2) == ""
    pod.see(FlipEnded(1, 2, None, "v1", False))
    assert not pod.facts.torn
    assert pod.admit("v1") == ""
    assert pod.did(OpenGuard)


def test_an_older_look_at_the_workers_settles_nothing(pod: InPlaceAgent) -> None:
    fails(pod, "aborted")
    pod.see(LiveObserved(None, False))
    assert pod.effects == []
    pod.see(Settled(1, 0, None, False))
    assert pod.effects == []
    pod.see(Settled(1, 1, None, True))
    assert pod.facts.torn


def test_one_mover_that_goes_on_writing_is_waited_for(pod: InPlaceAgent) -> None:
    pod.to(TRANSFERRING)
    failed = pod.mover_round(RoundPhase.FAILED, problem=BROKEN)
    pod.movers([0], epoch=pod.mover_epoch(EpochPhase.JOINED), round=failed)
    assert pod.phase is RoundPhase.FAILED
    assert pod.effects == []
    pod.movers([1], epoch=pod.mover_epoch(EpochPhase.JOINED), round=pod.mover_round(TRANSFERRING))
    assert pod.effects == []
    pod.movers([1], epoch=pod.mover_epoch(EpochPhase.JOINED), round=failed)
    assert pod.did(AskLive)


def test_a_mover_that_does_not_end_is_killed_and_the_pod_closes(pod: InPlaceAgent) -> None:
    pod.to(TRANSFERRING)
    failed = pod.mover_round(RoundPhase.FAILED, problem=BROKEN)
    pod.movers([0], epoch=pod.mover_epoch(EpochPhase.JOINED), round=failed)
    pod.wait(SETTLE_SECONDS)
    assert [e.movers for e in pod.did(KillMovers)] == [((1, "m1"),)]
    assert pod.did(EndRequests)
    assert (pod.facts.torn, pod.facts.serving) == (True, False)
    assert pod.prepare(round=2) == "Unsettled"
    pod.see(MoverLost(1, "m1"))
    assert pod.did(AskLive)
    pod.see(Settled(1, 1, None, False))
    assert not pod.did(GoOn), "it was let go when its requests were ended"
    assert pod.admit(None) == ""


def test_a_pod_that_hears_no_decision_fences_itself_and_knows_what_it_holds_when_it_hears_one(
    pod: InPlaceAgent,
) -> None:
    pod.to(VERIFIED)
    pod.wait(60)
    assert pod.did(AskDecision)[0].lead == LEAD
    pod.see(DecisionLearnt(1, 1, "unknown"))
    assert [type(e) for e in pod.effects] == [CloseGuard, EndRequests]
    pod.see(LiveObserved(None, True))
    assert pod.admit(None) == "Undecided"
    pod.wait(5)
    pod.see(DecisionLearnt(1, 1, "aborted"))
    assert pod.did(AskLive)
    pod.see(Settled(1, 1, None, True))
    assert pod.facts.torn
    assert pod.admit(None) == "Torn"


def test_a_commit_of_what_a_round_in_place_overwrites_is_not_taken_for_done(pod: InPlaceAgent) -> None:
    pod.to(VERIFIED)
    pod.commit()
    pod.see(FlipEnded(1, 1, None, "v1", False))
    assert pod.prepare(round=2) == ""
    pod.see(HoldEnded(1, 2, None))
    assert pod.transfer(round=2) == ""
    assert pod.commit(round=2) == "NotVerified"
    assert pod.abort(round=2) == ""
    assert pod.commit(round=2) == "Unsettled"


def test_a_mover_that_connects_after_the_failure_is_not_waited_for(pod: InPlaceAgent) -> None:
    pod.to(TRANSFERRING)
    pod.abort()
    pod.see(MoverLost(0, "m0"))
    pod.see(MoverReported(0, MoverState(mover_id="m0-next", pid=9, local_rank=0)))
    assert not pod.did(AskLive)
    pod.see(MoverLost(1, "m1"))
    assert pod.did(AskLive)


def test_a_round_that_ended_before_its_transfer_asks_nobody(pod: InPlaceAgent) -> None:
    pod.to(READY)
    pod.see(MoverLost(0, "m0"))
    assert (pod.phase, pod.effects) == (RoundPhase.FAILED, [GoOn()])
    assert pod.session.unsettled is None
