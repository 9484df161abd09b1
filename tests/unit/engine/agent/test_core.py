"""`AgentCore` around the session: servers that fail, that hang, and leads that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from weightsync_engine.agent import core as module
from weightsync_engine.agent.core import AgentCore, RequestRefused
from weightsync_engine.protocol.messages import (
    Abort,
    Admit,
    Commit,
    EpochPhase,
    FlipPolicy,
    Halt,
    JoinEpoch,
    Prepare,
    Problem,
    Rendezvous,
    RoundPhase,
    Transfer,
)
from weightsync_engine.protocol.mover import MoverEpoch, MoverRound, MoverState
from weightsync_engine.protocol.session import AskDecision, Flip, MoverLost, MoverReported, Pod, Verdict

BOOT = "boot-0123456789"
WHO = {"boot_id": BOOT, "object_uid": "uid-1", "term": 1}
LEAD = Rendezvous(host="127.0.0.1", port=9)
POD = Pod("inference", BOOT, "vllm-0", None, "127.0.0.1", 1)


class FakeServer:
    workers = 1
    problem: Problem | None = None

    def __init__(self) -> None:
        self.version: str | None = None
        self.torn = False
        self.flips = 0
        self.fails: BaseException | Problem | None = None
        self.hangs = False
        self.mute = False
        self.held = False
        self.calls: list[str] = []

    async def flip(self, flip: Flip) -> Problem | None:
        self.flips += 1
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.fails, BaseException):
            raise self.fails
        if self.fails is None:
            self.version, self.held = flip.version, False
        return self.fails

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> Problem | None:
        self.calls.append("hold")
        self.held = True
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.held = False
            raise
        return None

    async def go_on(self) -> None:
        self.calls.append("go on")
        self.held = False

    async def end_requests(self) -> Problem | None:
        self.calls.append("end")
        self.held = False
        return None

    async def live(self) -> tuple[str | None, bool]:
        if self.mute:
            raise RuntimeError("the engine is dead")
        return self.version, self.torn


class Asked:
    """The lead, as the agent asks it."""

    verdict: Verdict | None = None

    async def __call__(self, ask: AskDecision, timeout: float) -> Verdict:
        if self.verdict is None:
            raise ConnectionError("nobody there")
        return self.verdict


@pytest.fixture
async def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
async def asked() -> Asked:
    return Asked()


@pytest.fixture
async def core(server: FakeServer, asked: Asked, tmp_path: Path) -> AsyncIterator[AgentCore]:
    core = AgentCore(POD, [tmp_path / "none.sock"], server, ask=asked)
    await core.start()
    await until(core, lambda: core.session.live_known)
    core.post(Admit(**WHO, version=None))
    yield core
    await core.close()


async def until(core: AgentCore, true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await core.wait_state(core.state().revision, 0.05)


MOVER = MoverState(mover_id="m", pid=1, local_rank=0)
EPOCH = MoverEpoch(object_uid="uid-1", term=1, epoch=1, phase=EpochPhase.JOINED)


def joined(core: AgentCore) -> None:
    core.post(
        JoinEpoch(
            **WHO,
            epoch=1,
            first_rank=1,
            world_size=2,
            trainer_ranks=1,
            rendezvous=LEAD,
            lead_agent=LEAD,
            key="k" * 32,
            deadline_seconds=60,
        )
    )
    core._observe(MoverReported(0, MOVER))
    core._observe(MoverReported(0, MOVER.model_copy(update={"epoch": EPOCH})))


def verified(core: AgentCore, decide_by: float = 600) -> None:
    joined(core)
    core.post(
        Prepare(**WHO, epoch=1, round=1, version="v1", deadline_seconds=60, decide_by_seconds=decide_by)
    )
    core.post(Transfer(**WHO, epoch=1, round=1, deadline_seconds=60))
    done = MoverRound(epoch=1, round=1, version="v1", phase=RoundPhase.VERIFIED)
    core._observe(MoverReported(0, MOVER.model_copy(update={"epoch": EPOCH, "round": done})))
    assert phase(core) is RoundPhase.VERIFIED


def phase(core: AgentCore) -> RoundPhase | None:
    return core.session.round.phase if core.session.round else None


def commit(core: AgentCore, deadline: float = 60) -> None:
    core.post(Commit(**WHO, epoch=1, round=1, version="v1", deadline_seconds=deadline))


async def test_a_commit_flips_and_goes_on_serving(core: AgentCore, server: FakeServer) -> None:
    verified(core)
    commit(core)
    await until(core, lambda: phase(core) is RoundPhase.COMMITTED)
    assert (server.flips, core.serving) == (1, True)
    facts = core.state().inference
    assert facts is not None and facts.live_version == "v1"


@pytest.mark.parametrize(
    "fails", [RuntimeError("the engine is busy"), Problem(reason="Asleep", message="the engine is busy")]
)
async def test_a_failed_flip_fences_and_a_repeated_commit_mends_it(
    core: AgentCore, server: FakeServer, fails: Exception | Problem
) -> None:
    server.fails = fails
    verified(core)
    commit(core)
    await until(core, lambda: not core.serving)
    state = core.state()
    assert state.round is not None and state.round.problem is not None
    assert state.round.phase is RoundPhase.COMMITTING and "the engine is busy" in state.round.problem.message
    server.fails = None
    commit(core)
    await until(core, lambda: phase(core) is RoundPhase.COMMITTED)
    core.post(Admit(**WHO, version="v1"))
    assert core.serving


async def test_a_flip_that_hangs_ends_at_its_deadline(
    core: AgentCore, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLIP_GRACE_SECONDS", 0.0)
    server.hangs = True
    verified(core)
    commit(core, deadline=0.05)
    await until(core, lambda: not core.serving)
    state = core.state()
    assert state.round is not None and state.round.problem is not None
    assert state.round.problem.reason == "FlipTimeout" and "vllm-0" in state.round.problem.message


async def test_workers_that_do_not_say_what_they_hold_after_a_flip_are_not_trusted(
    core: AgentCore, server: FakeServer
) -> None:
    verified(core)
    server.mute = True
    commit(core)
    await until(core, lambda: not core.serving)
    assert phase(core) is RoundPhase.COMMITTING
    server.mute = False
    commit(core)
    await until(core, lambda: phase(core) is RoundPhase.COMMITTED)


async def test_a_lead_that_does_not_answer_leaves_the_pod_fenced(core: AgentCore, server: FakeServer) -> None:
    verified(core, decide_by=0.02)
    await until(core, lambda: not core.serving)
    assert "nobody says whether it was committed" in core.closed_because
    with pytest.raises(RequestRefused, match="undecided"):
        core.post(Admit(**WHO, version=None))
    assert server.flips == 0


async def test_a_decision_learnt_from_the_lead_is_carried_out(core: AgentCore, asked: Asked) -> None:
    asked.verdict = "committed"
    verified(core, decide_by=0.02)
    await until(core, lambda: phase(core) is RoundPhase.COMMITTED)
    assert core.serving


def halt(core: AgentCore, deadline: float = 60) -> None:
    core.post(Halt(**WHO, epoch=1, round=1, deadline_seconds=deadline))


async def halted(core: AgentCore) -> None:
    await until(core, lambda: (facts := core.state().inference) is not None and facts.halted is not None)


async def test_a_halted_server_stands_still_until_it_flips(core: AgentCore, server: FakeServer) -> None:
    verified(core)
    halt(core)
    await halted(core)
    assert server.held and core.serving
    commit(core)
    await until(core, lambda: phase(core) is RoundPhase.COMMITTED)
    assert not server.held and core.serving
    assert server.calls == ["hold"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_abort_lets_the_server_go_on_also_one_that_does_not_come_to_a_stop(
    core: AgentCore, server: FakeServer, hangs: bool
) -> None:
    verified(core)
    server.hangs = hangs
    halt(core)
    await until(core, lambda: server.held)
    core.post(Abort(**WHO, epoch=1, round=1, problem=Problem(reason="Test", message="no more")))
    await until(core, lambda: server.calls[-1] == "go on")
    assert not server.held and core.serving


async def test_a_halted_server_that_hears_nothing_ends_its_requests_and_stays_closed(
    core: AgentCore, server: FakeServer
) -> None:
    verified(core)
    halt(core, deadline=0.05)
    await until(core, lambda: server.calls[-1:] == ["end"])
    assert not server.held and not core.serving
    await halted(core)


async def test_an_agent_that_ends_leaves_no_server_halted(core: AgentCore, server: FakeServer) -> None:
    verified(core)
    halt(core)
    await halted(core)
    await core.close()
    assert not server.held and not core.serving
    assert server.calls[-1] == "end", "what runs there must not go on with the old weights"


@pytest.fixture
async def in_place(server: FakeServer, asked: Asked, tmp_path: Path) -> AsyncIterator[AgentCore]:
    """Its movers write to the live weights, and have been told to."""
    pod = replace(POD, in_place=True)
    core = AgentCore(pod, [tmp_path / "none.sock"], server, ask=asked)
    await core.start()
    await until(core, lambda: core.session.live_known)
    core.post(Admit(**WHO, version=None))
    joined(core)
    core.post(Prepare(**WHO, epoch=1, round=1, version="v1", deadline_seconds=60, decide_by_seconds=600))
    await until(core, lambda: phase(core) is RoundPhase.READY)
    assert server.held
    core.post(Transfer(**WHO, epoch=1, round=1, deadline_seconds=60))
    yield core
    await core.close()


@pytest.mark.parametrize("said", ["torn", "nothing"])
async def test_a_transfer_in_place_that_fails_is_torn_by_the_workers_word_or_for_want_of_it(
    in_place: AgentCore, server: FakeServer, said: str
) -> None:
    server.torn, server.mute = said == "torn", said == "nothing"
    in_place._observe(MoverLost(0, "m"))
    await until(in_place, lambda: server.calls[-1] == "end")
    assert server.calls == ["hold", "end"]
    facts = in_place.state().inference
    assert facts is not None and (facts.torn, facts.serving) == (True, False)
    assert "MoverLost" in in_place.closed_because


async def test_a_transfer_in_place_that_wrote_nothing_lets_the_server_go_on(
    in_place: AgentCore, server: FakeServer
) -> None:
    in_place._observe(MoverLost(0, "m"))
    await until(in_place, lambda: server.calls[-1] == "go on")
    assert server.calls == ["hold", "go on"]
    assert in_place.serving


async def test_closing_ends_the_long_polls_and_stops_serving(core: AgentCore) -> None:
    poll = asyncio.create_task(core.wait_state(core.state().revision, 30))
    await asyncio.sleep(0)
    await core.close()
    await asyncio.wait_for(poll, 5)
    assert not core.serving and not core.ready


async def test_progress_alone_does_not_wake_the_operator_at_every_step(core: AgentCore) -> None:
    verified(core)
    core._last_progress = asyncio.get_running_loop().time()
    before = core.state().revision
    round_ = core.session.round
    assert round_ is not None
    core._apply(replace(core.session, round=replace(round_, bytes_done=7)), ())
    assert core.state().revision == before
    state = await core.wait_state(before, 10)
    assert state.round is not None and (state.revision, state.round.bytes_done) == (before + 1, 7)


def test_sockets_and_ranks_must_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 mover sockets for 1"):
        AgentCore(POD, [], FakeServer())
    with pytest.raises(ValueError, match="role inference"):
        AgentCore(POD, [tmp_path / "x"])
