"""Any order of requests and events, the operator's and a broken one's: what never happens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync_engine.protocol.messages import (
    Abort,
    Addressed,
    Admit,
    Commit,
    EpochPhase,
    Fence,
    Halt,
    JoinEpoch,
    Leave,
    Prepare,
    Problem,
    Published,
    Rendezvous,
    RoundPhase,
    Transfer,
)
from weightsync_engine.protocol.mover import MoverEpoch, MoverRound, MoverState
from weightsync_engine.protocol.session import (
    FINAL,
    ORDER,
    AskDecision,
    AskLive,
    DecisionLearnt,
    EndRequests,
    Event,
    Flip,
    FlipEnded,
    GoOn,
    Hold,
    HoldEnded,
    KillMovers,
    LiveObserved,
    MoverLost,
    MoverReported,
    OpenStore,
    Pod,
    Refused,
    RequestsEnded,
    Session,
    Settled,
    StartTransfer,
    StoreOpened,
    TellOutcome,
    TimePassed,
    Verdict,
    agent_state,
    handle,
    next_deadline,
    observe,
)

BOOT = "boot-0123456789"
STORE = Rendezvous(host="10.0.0.1", port=4000)
SERVER = Pod("inference", BOOT, "vllm-0", "v-uid", "10.0.0.2", 2)
IN_PLACE = replace(SERVER, in_place=True)
TRAINER = Pod("trainer", BOOT, "trainer-0", "t-uid", "10.0.0.1", 2, "run", (0, 1), 2)
BROKEN = Problem(reason="Broken", message="because")

small = st.integers(1, 3)
uids = st.sampled_from(["uid-1"] * 8 + ["uid-2"])


def version_of(epoch: int, round_: int) -> str:
    return f"v-{epoch}-{round_}"


@st.composite
def requests(draw: st.DrawFn, trainer: bool) -> Addressed:
    who: dict[str, Any] = {"boot_id": BOOT, "object_uid": draw(uids), "term": draw(small)}
    epoch, round_ = draw(small), draw(small)
    verb = draw(
        st.sampled_from(
            ["join", "prepare", "transfer", "halt", "commit", "commit", "abort", "admit", "fence", "leave"]
        )
    )
    if verb == "join":
        return JoinEpoch(
            **who, epoch=epoch, first_rank=0 if trainer else 2, world_size=4, trainer_ranks=2,
            rendezvous=None if trainer else STORE, key="k" * 32, lead_agent=STORE, deadline_seconds=5,
        )  # fmt: skip
    if verb == "prepare":
        version = version_of(epoch, round_)
        return Prepare(
            **who, epoch=epoch, round=round_, version=version, deadline_seconds=5, decide_by_seconds=9
        )
    if verb == "transfer":
        return Transfer(**who, epoch=epoch, round=round_, deadline_seconds=5)
    if verb == "halt":
        return Halt(**who, epoch=epoch, round=round_, deadline_seconds=4)
    if verb == "commit":
        version = version_of(epoch, round_)
        return Commit(**who, epoch=epoch, round=round_, version=version, deadline_seconds=5)
    if verb == "abort":
        return Abort(**who, epoch=epoch, round=round_, problem=BROKEN)
    if verb == "admit":
        version_ = draw(st.sampled_from([None, version_of(epoch, round_)]))
        return Admit(**who, version=version_, after=draw(st.integers(0, 3)))
    return Fence(**who, problem=BROKEN) if verb == "fence" else Leave(**who, epoch=epoch)


@st.composite
def mover_reports(draw: st.DrawFn) -> MoverReported:
    local = draw(st.integers(0, 1))
    epoch, round_ = draw(small), draw(small)
    phase = draw(st.sampled_from([EpochPhase.JOINED] * 4 + [EpochPhase.JOINING, EpochPhase.FAILED]))
    ended = draw(st.sampled_from([RoundPhase.VERIFIED] * 4 + [RoundPhase.TRANSFERRING, RoundPhase.FAILED]))
    state = MoverState(
        mover_id=f"m{local}-{draw(st.sampled_from([1, 1, 1, 2]))}",
        pid=1,
        local_rank=local,
        snapshot=draw(
            st.none() | st.just(Published(version=version_of(epoch, round_), sequence=10 * epoch + round_))
        ),
        epoch=MoverEpoch(
            object_uid="uid-1",
            term=1,
            epoch=epoch,
            phase=phase,
            reusable=phase is not EpochPhase.JOINED and draw(st.booleans()),
        ),
        round=MoverRound(epoch=epoch, round=round_, version=version_of(epoch, round_), phase=ended),
    )
    return MoverReported(local, state)


@st.composite
def good_movers(draw: st.DrawFn) -> str:
    """What the rest of the world may do next: obey, the operator's natural next step, or fail."""
    kinds = (
        ["obey"] * 3
        + ["next"] * 6
        + ["halt", "stop", "stop", "stop fails", "end"]
        + ["flip", "flip", "flip-fails", "flip-tears", "late", "alone", "asked"]
    )
    kinds += ["die", "settle", "settle", "untouched"]
    return draw(st.sampled_from([*kinds, "asked in vain", "commit now", "abort now", "look", "tear"]))


def events(trainer: bool) -> st.SearchStrategy[Any]:
    # Mostly the natural course, so that every phase is reached; the rest is what breaks it.
    natural: list[st.SearchStrategy[Any]] = [good_movers() for _ in range(12)]
    kinds: list[st.SearchStrategy[Any]] = [
        *natural,
        requests(trainer),
        mover_reports(),
        st.builds(MoverLost, st.integers(0, 1), st.sampled_from(["m0-1", "m1-1"])),
        st.sampled_from([0.5, 3.0, 10.0]),
    ]
    if trainer:
        kinds.append(st.builds(StoreOpened, small, st.just(STORE)))
    return st.one_of(*kinds)


@dataclass
class World:
    """The session and the bits of the outside that must fit it: the workers, and what was asked for."""

    session: Session
    now: float = 0.0
    live: str | None = None
    torn: bool = False
    flip: Flip | None = None
    ask: AskDecision | None = None
    stopping: tuple[Hold | EndRequests, ...] = ()
    """What the server was told to do with its scheduler and has not done yet."""
    standing: bool = False
    running: bool = False
    """Requests that were let in once: they never end by themselves."""
    told: frozenset[tuple[int, int]] = frozenset()
    """(epoch, round) whose commit was accepted or learnt."""
    writing: dict[str, tuple[int, int]] = field(default_factory=dict)
    """In place: movers that may write to the live weights, and for which (epoch, round)."""
    killed: tuple[tuple[int, str], ...] = ()
    unsettled: AskLive | None = None
    unended: bool = False
    """Requests could not be ended: the server says so, and nothing more can be done."""

    def take(self, session: Session, effects: tuple[Any, ...]) -> None:
        before, self.session = self.session, session
        check(before, session, effects, self)
        for effect in effects:
            if isinstance(effect, Flip):
                assert self.flip is None, "two flips at once"
                assert before.round is not None, "a flip without a round"
                assert before.round.phase in (RoundPhase.VERIFIED, RoundPhase.COMMITTING), "not verified"
                assert (effect.epoch, effect.round) in self.told, "a flip without a decision"
                self.flip = effect
            if isinstance(effect, AskDecision):
                self.ask = effect
            if isinstance(effect, KillMovers):
                self.killed += effect.movers
            if isinstance(effect, StartTransfer) and session.pod.in_place:
                assert self.standing and not self.stopping, "written to while the server generates"
                assert session.epoch is not None
                self.torn = True
                where = (effect.message.epoch, effect.message.round)
                self.writing[session.epoch.joined[effect.local_rank]] = where
            if isinstance(effect, AskLive):
                assert not self.writing, "asked what is live while it may still change"
                self.unsettled = effect
            if isinstance(effect, EndRequests | GoOn):
                # A hold that is still under way is not waited for.
                self.stopping = tuple(e for e in self.stopping if not isinstance(e, Hold))
            if isinstance(effect, Hold | EndRequests):
                self.stopping += (effect,)
            if isinstance(effect, GoOn):
                self.standing = False
        self.running = self.running or session.guard.open
        self.check_halt()

    def stop(self, fails: bool) -> None:
        """The next thing that the server was told to do with its scheduler."""
        if not self.stopping or self.flip is not None:
            return
        effect, *rest = self.stopping
        self.stopping = tuple(rest)
        if isinstance(effect, Hold):
            self.standing = not fails
            self.event(HoldEnded(effect.epoch, effect.round, BROKEN if fails else None))
        else:
            self.standing = False
            self.running = fails or self.session.guard.open
            self.unended = self.unended or fails
            self.event(RequestsEnded(effect.mark, BROKEN if fails else None))

    def check_halt(self) -> None:
        session = self.session
        mark, round_ = session.halt, session.round
        if mark is not None and mark.step == "done" and session.pod.role == "inference":
            assert self.standing or not self.running, "said to have halted, and generates"
        if session.pod.in_place and self.torn and not self.stopping and not self.unended:
            assert self.standing or not self.running, "generates with weights of no one version"
        if self.standing and not self.stopping and (left := session.unsettled) is not None:
            assert left.held, "nobody will ever let the scheduler go on"
            assert left.deadline is not None and left.deadline < float("inf"), (
                "it stands still without an end"
            )
        elif self.standing and not self.stopping:
            assert round_ is not None and round_.held, "nobody will ever let the scheduler go on"
            bounded = round_.flipping or round_.asking or round_.decide_by is not None
            assert bounded, "the scheduler stands still without an end"

    def event(self, event: Event) -> None:
        self.note_writers(event)
        self.take(*observe(self.session, event, self.now))

    def note_writers(self, event: Event) -> None:
        """Who has stopped writing by what is told now."""
        if isinstance(event, MoverLost):
            self.writing.pop(event.mover_id, None)
        if not isinstance(event, MoverReported) or event.state.mover_id in self.session.condemned:
            return
        state, before = event.state, self.session.movers.get(event.local_rank)
        if before is not None and before.mover_id != state.mover_id:
            self.writing.pop(before.mover_id, None)
        r = state.round
        if r is None or state.epoch is None or state.epoch.phase is not EpochPhase.JOINED:
            return
        if self.writing.get(state.mover_id) == (r.epoch, r.round) and r.phase is not RoundPhase.TRANSFERRING:
            del self.writing[state.mover_id]

    def settle(self, untouched: bool) -> None:
        """The workers answer what they hold; `untouched`: the transfer failed before anybody wrote."""
        ask, self.unsettled = self.unsettled, None
        if ask is not None:
            self.torn = self.torn and not untouched
            self.event(Settled(ask.epoch, ask.round, self.live, self.torn))

    def step(self, step: Any) -> None:
        if isinstance(step, Addressed):
            # Told before it is known whether it is accepted: a flip may follow at once.
            told = self.told
            if isinstance(step, Commit):
                self.told |= {(step.epoch, step.round)}
            answer = handle(self.session, step, self.now)
            if isinstance(answer, Refused):
                self.told = told
                return
            self.take(answer.session, answer.effects)
        elif isinstance(step, float) or step == "late":
            self.now += 10.0 if step == "late" else step
            self.event(TimePassed())
            due = next_deadline(self.session)
            assert due is None or due > self.now, "a deadline that has passed and is still waited for"
        elif step == "alone":
            for part in ("late", "asked in vain"):
                self.step(part)
        elif step == "obey":
            self.obey()
        elif step == "next":
            self.step(self.next_request())
        elif step in ("flip", "flip-fails", "flip-tears"):
            self.end_flip(step)
        elif step in ("stop", "stop fails", "end"):
            self.stop(fails=step == "stop fails")
        elif step == "halt":
            if (round_ := self.session.round) is not None:
                who = {"boot_id": BOOT, "object_uid": self.session.object_uid, "term": self.session.term}
                self.step(Halt(**who, epoch=round_.epoch, round=round_.round, deadline_seconds=4))
        elif step == "die":
            killed, self.killed = self.killed, ()
            for local_rank, mover in killed:
                self.event(MoverLost(local_rank, mover))
        elif step in ("settle", "untouched"):
            self.settle(step == "untouched")
        elif step in ("asked", "asked in vain"):
            if self.ask is not None:
                ask, self.ask = self.ask, None
                if step == "asked":
                    self.told |= {(ask.epoch, ask.round)}
                verdict: Verdict = "committed" if step == "asked" else "unknown"
                self.event(DecisionLearnt(ask.epoch, ask.round, verdict))
        elif step in ("commit now", "abort now"):
            if (round_ := self.session.round) is not None:
                who = {"boot_id": BOOT, "object_uid": self.session.object_uid, "term": self.session.term}
                which = {"epoch": round_.epoch, "round": round_.round}
                if step == "commit now":
                    self.step(Commit(**who, **which, version=round_.version, deadline_seconds=5))
                else:
                    self.step(Abort(**who, **which, problem=BROKEN))
        elif step in ("look", "tear"):
            if self.session.pod.role == "inference" and self.flip is None:
                self.torn = self.torn or (step == "tear" and not self.session.pod.in_place)
                self.event(LiveObserved(self.live, self.torn))
        else:
            self.event(step)

    def next_request(self) -> Addressed:
        """What an operator would ask for now."""
        session = self.session
        who = {"boot_id": BOOT, "object_uid": session.object_uid or "uid-1", "term": max(session.term, 1)}
        trainer, epoch, round_ = session.pod.role == "trainer", session.epoch, session.round
        if epoch is None or epoch.phase is EpochPhase.FAILED:
            return JoinEpoch(
                **who,
                epoch=session.last_epoch + 1,
                first_rank=0 if trainer else 2,
                world_size=4,
                trainer_ranks=2,
                rendezvous=None if trainer else STORE,
                key="k" * 32,
                lead_agent=STORE,
                deadline_seconds=5,
            )
        number = epoch.request.epoch
        if round_ is None or round_.phase in FINAL:
            if not trainer and not session.guard.open and not session.torn and self.session.live_known:
                return Admit(**who, version=session.live)
            following = max(epoch.round_floor, round_.round if round_ else 0) + 1
            return Prepare(
                **who,
                epoch=number,
                round=following,
                version=version_of(number, following),
                deadline_seconds=5,
                decide_by_seconds=9,
            )
        if round_.phase is RoundPhase.READY:
            return Transfer(**who, epoch=number, round=round_.round, deadline_seconds=5)
        version = version_of(number, round_.round)
        return Commit(**who, epoch=number, round=round_.round, version=version, deadline_seconds=5)

    def obey(self) -> None:
        epoch, round_ = self.session.epoch, self.session.round
        if epoch is None:
            return
        if self.session.pod.role == "trainer" and epoch.rendezvous is None:
            self.event(StoreOpened(epoch.request.epoch, STORE))
        for i in (0, 1):
            mine = self.session.epoch
            assert mine is not None
            state = MoverState(
                mover_id=mine.joined.get(i, f"new-{self.now}-{i}"),
                pid=1,
                local_rank=i,
                snapshot=Published(version=round_.version, sequence=99) if round_ else None,
                epoch=MoverEpoch(
                    object_uid=mine.request.object_uid,
                    term=mine.request.term,
                    epoch=mine.request.epoch,
                    phase=EpochPhase.JOINED,
                ),
                round=MoverRound(
                    epoch=round_.epoch, round=round_.round, version=round_.version, phase=RoundPhase.VERIFIED
                )
                if round_
                else None,
            )
            self.event(MoverReported(i, state))

    def end_flip(self, how: str) -> None:
        flip, self.flip = self.flip, None
        if flip is None:
            return
        if how == "flip":
            self.live, self.torn, self.standing = flip.version, False, False
        elif how == "flip-tears":
            self.torn = True
        problem = None if how == "flip" else BROKEN
        self.event(FlipEnded(flip.epoch, flip.round, problem, self.live, self.torn))


def check(before: Session, after: Session, effects: tuple[Any, ...], world: World) -> None:
    agent_state(after, 1)
    # A round moves forward only, and what is final stays.
    old, new = before.round, after.round
    same = old is not None and new is not None and (old.epoch, old.round) == (new.epoch, new.round)
    if same and before.object_uid == after.object_uid and old is not None and new is not None:
        same_join = before.epoch is not None and after.epoch is not None
        if same_join:
            assert ORDER[new.phase] >= ORDER[old.phase]
            assert old.phase not in FINAL or new.phase is old.phase
            assert new.version == old.version
    # Nothing is committed without the word.
    if new is not None and new.phase in (RoundPhase.COMMITTING, RoundPhase.COMMITTED):
        assert (new.epoch, new.round) in world.told
    # Inference: committed means live, and the guard is open only with what is live and whole.
    if after.pod.role == "inference":
        in_flux = after.unsettled is not None or (
            after.pod.in_place
            and new is not None
            and (new.phase in (RoundPhase.TRANSFERRING, RoundPhase.VERIFIED) or new.flipping)
        )
        assert in_flux or (after.live, after.torn) == (world.live, world.torn) or not after.live_known
        committing_now = (
            new is not None
            and new.phase is RoundPhase.COMMITTED
            and not (same and old is not None and old.phase is new.phase)
        )
        if committing_now and new is not None:
            assert after.live == new.version and not after.torn
        if after.guard.open:
            assert not after.torn
            assert after.guard.admitted == after.live
            assert new is None or not new.fenced
        assert not any(isinstance(e, TellOutcome | OpenStore) for e in effects)
    else:
        assert not after.guard.open
        assert not any(isinstance(e, Flip) for e in effects)
    # An epoch's number only grows for one object, and movers that were condemned are out.
    if before.object_uid == after.object_uid:
        assert after.last_epoch >= before.last_epoch
        assert after.term >= before.term
    assert not {s.mover_id for s in after.movers.values()} & after.condemned
    for effect in effects:
        if isinstance(effect, KillMovers):
            assert {mover for _, mover in effect.movers} <= after.condemned | frozenset()


course = st.integers(0, 8).map(lambda n: ["next", "stop", "obey"] * n)
"""A start without trouble, of any length: into an epoch, a round, its transfer, its commit."""
servers = st.sampled_from([SERVER, IN_PLACE])


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(servers, course, st.lists(events(trainer=False), max_size=40))
def test_a_server_never_goes_live_without_a_decision_nor_serves_what_it_should_not(
    pod: Pod, start: list[str], steps: list[Any]
) -> None:
    session, _ = observe(Session(pod), LiveObserved(None, False), 0.0)
    world = World(session)
    for step in [*start, *steps]:
        world.step(step)


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(course, st.lists(events(trainer=True), max_size=40))
def test_a_trainer_never_reports_a_commit_that_was_not_decided(start: list[str], steps: list[Any]) -> None:
    world = World(Session(TRAINER))
    for step in [*start, *steps]:
        world.step(step)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(servers, course, st.lists(events(trainer=False), max_size=30), requests(trainer=False))
def test_a_request_that_was_accepted_may_be_repeated(
    pod: Pod, start: list[str], steps: list[Any], request: Addressed
) -> None:
    session, _ = observe(Session(pod), LiveObserved(None, False), 0.0)
    world = World(session)
    for step in [*start, *steps]:
        world.step(step)
    first = handle(world.session, request, world.now)
    if isinstance(first, Refused):
        assert handle(world.session, request, world.now) == first
        return
    again = handle(first.session, request, world.now)
    assert not isinstance(again, Refused)
    assert replace(again.session) == first.session
    assert again.effects == ()
