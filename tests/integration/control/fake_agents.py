"""Agents without movers: real HTTP servers that speak the real protocol and verify the operator's real token.

They run in a thread of their own, so that tests may block. A test plays the movers by the fields of `Script`.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jwt
from aiohttp import web
from pydantic import ValidationError

from weightsync_engine.protocol.messages import (
    REQUESTS,
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
    Leave,
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
from weightsync_engine.protocol.names import ROUTE_PREFIX, ROUTE_STATE, audience

T = TypeVar("T")
BYTES = 2_000_000_000


@dataclass
class Script:
    """What a test makes the movers of a pod do."""

    join_problem: Problem | None = None
    transfer_problem: Problem | None = None
    hold_transfer: bool = False
    """Stay in Transferring."""
    hold_commit: bool = False
    """Take commits for granted only later: answer, stay Verified."""
    hold_halt: bool = False
    """Answer, and go on generating."""
    plan_digest: str = "d1"
    parameters: int = 10


class Refused(Exception):
    def __init__(self, reason: str, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status


class FakeAgent:
    """One pod's agent. All attributes may be read from any thread; change them through `Fleet.change`."""

    def __init__(self, fleet: Fleet, state: AgentState, uid: str) -> None:
        self.fleet = fleet
        self.state = state
        self.script = Script()
        self.requests: list[tuple[str, Addressed]] = []
        self.object_uid = uid
        self.term = 0
        self.polls = 0
        self.port = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.namespace, self.name = "", ""

    def verbs(self, *names: str) -> list[str]:
        return [verb for verb, _ in self.requests if not names or verb in names]

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.add_routes([web.get(ROUTE_STATE, self._get), web.post(ROUTE_PREFIX + "{verb}", self._post)])
        # Open polls must not delay the end of a test.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def update(self, **fields: Any) -> None:
        self.state = self.state.model_copy(update={"revision": self.state.revision + 1, **fields})
        self._changed.set()
        self._changed = asyncio.Event()

    def _refusal(self, error: Refused) -> web.Response:
        return web.json_response({"reason": error.reason, "message": str(error)}, status=error.status)

    def _verify(self, request: web.Request) -> None:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer" or not token:
            raise Refused("NoToken", "no bearer token", 401)
        try:
            key = self.fleet.keys[jwt.get_unverified_header(token)["kid"]]
            claims = jwt.decode(
                token,
                key.key,
                algorithms=["RS256"],
                audience=audience(self.namespace, self.name),
            )
        except (jwt.PyJWTError, KeyError) as error:
            raise Refused("BadToken", str(error), 401) from error
        if claims["sub"] != "system:serviceaccount:weightsync-system:weightsync-operator":
            raise Refused("NotTheOperator", claims["sub"], 401)

    async def _get(self, request: web.Request) -> web.Response:
        try:
            self._verify(request)
        except Refused as error:
            return self._refusal(error)
        self.polls += 1
        seen, wait = request.query.get("seen"), float(request.query.get("wait", 0))
        if seen is not None and int(seen) == self.state.revision and wait:
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                pass
        return web.Response(text=self.state.model_dump_json(), content_type="application/json")

    async def _post(self, request: web.Request) -> web.Response:
        try:
            self._verify(request)
            verb = request.match_info["verb"]
            try:
                message = REQUESTS[verb].model_validate_json(await request.read())
            except ValidationError as error:
                raise Refused("Malformed", str(error), 422) from error
            self.requests.append((verb, message))
            if message.boot_id != self.state.boot_id:
                raise Refused("AnotherProcess", f"this is {self.state.boot_id}")
            if message.object_uid == self.object_uid and message.term < self.term:
                raise Refused("OldTerm", f"term {self.term} is known")
            self.object_uid, self.term = message.object_uid, message.term
            self.state = self.state.model_copy(update={"object_uid": message.object_uid})
            self._do(message)
        except Refused as error:
            return self._refusal(error)
        return web.Response(text=self.state.model_dump_json(), content_type="application/json")

    def _do(self, message: Addressed) -> None:
        match message:
            case JoinEpoch():
                self._join(message)
            case Prepare():
                self._round_start(message)
            case Transfer():
                self._transfer(message)
            case Halt() if self.script.hold_halt:
                pass
            case Halt():
                self.set_inference(halted=Halted(term=message.term, round=message.round))
            case Commit():
                self._commit(message)
            case Abort():
                now = self._round(message.epoch, message.round)
                if now.phase not in (RoundPhase.COMMITTED, RoundPhase.COMMITTING):
                    self.update(
                        round=now.model_copy(update={"phase": RoundPhase.ABORTED, "problem": message.problem})
                    )
            case Admit():
                assert self.state.inference is not None
                if self.state.inference.live_version != message.version:
                    raise Refused("NotLive", f"live is {self.state.inference.live_version}")
                self.set_inference(serving=True, closed_because="")
            case Fence():
                self.set_inference(serving=False, closed_because=message.problem.message)
            case Leave():
                self.update(epoch=None, round=None)

    def set_inference(self, **fields: Any) -> None:
        assert self.state.inference is not None
        self.update(inference=self.state.inference.model_copy(update=fields))

    def _join(self, join: JoinEpoch) -> None:
        old = self.state.epoch
        if old is not None and (old.term, old.epoch) == (join.term, join.epoch):
            return
        if old is not None and old.epoch > join.epoch:
            raise Refused("OldEpoch", f"epoch {old.epoch} is known")
        lead = join.first_rank == 0
        if lead != (join.rendezvous is None):
            raise Refused("BadJoin", "the lead joins without a rendezvous, others with one", 422)
        plan = PlanSummary(
            digest=self.script.plan_digest,
            parameters=self.script.parameters,
            direct=self.script.parameters,
            fallback=0,
            bytes_total=BYTES,
            steps=4,
        )
        problem = self.script.join_problem
        self.update(
            epoch=EpochState(
                term=join.term,
                epoch=join.epoch,
                phase=EpochPhase.FAILED if problem else EpochPhase.JOINED,
                rendezvous=Rendezvous(host="127.0.0.1", port=4000) if lead else None,
                plan=None if problem else plan,
                problem=problem,
            ),
            round=None,
        )

    def _round(self, epoch: int, number: int) -> RoundState:
        now = self.state.round
        if now is None or (now.epoch, now.round) != (epoch, number):
            raise Refused("NoSuchRound", f"round {number} of epoch {epoch} is not known here")
        return now

    def _round_start(self, prepare: Prepare) -> None:
        if self.state.epoch is None or self.state.epoch.epoch != prepare.epoch:
            raise Refused("NoSuchEpoch", f"epoch {prepare.epoch} is not known here")
        now = self.state.round
        if now is not None and now.round >= prepare.round:
            if now.round > prepare.round:
                raise Refused("OldRound", f"round {now.round} is known")
            return
        self.update(
            round=RoundState(
                epoch=prepare.epoch,
                round=prepare.round,
                version=prepare.version,
                phase=RoundPhase.READY,
                bytes_total=BYTES,
            )
        )

    def _transfer(self, transfer: Transfer) -> None:
        now = self._round(transfer.epoch, transfer.round)
        if now.phase is not RoundPhase.READY:
            return
        self.update(round=now.model_copy(update={"phase": RoundPhase.TRANSFERRING}))
        if not self.script.hold_transfer:
            self.finish_transfer()

    def finish_transfer(self) -> None:
        now, problem = self.state.round, self.script.transfer_problem
        assert now is not None
        phase = RoundPhase.FAILED if problem else RoundPhase.VERIFIED
        self.update(
            round=now.model_copy(
                update={"phase": phase, "seconds": 0.5, "bytes_done": BYTES, "problem": problem}
            )
        )

    def _commit(self, commit: Commit) -> None:
        now = self._round(commit.epoch, commit.round)
        if now.phase is RoundPhase.COMMITTED:
            return
        if now.phase is not RoundPhase.VERIFIED:
            raise Refused("NotVerified", f"the round is {now.phase}")
        if self.script.hold_commit:
            return
        fields: dict[str, Any] = {"round": now.model_copy(update={"phase": RoundPhase.COMMITTED})}
        if self.state.inference is not None:
            fields["inference"] = self.state.inference.model_copy(
                update={"live_version": commit.version, "torn": False, "halted": None}
            )
        if self.state.trainer is not None:
            fields["trainer"] = self.state.trainer.model_copy(update={"committed": commit.version})
        self.update(**fields)


class Fleet:
    """All fake agents of a test, on an event loop in a thread."""

    def __init__(self, jwks: dict[str, Any]) -> None:
        self.keys = {key.key_id: key for key in jwt.PyJWKSet.from_dict(jwks).keys}
        self.agents: list[FakeAgent] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake agents", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def change(self, what: Callable[[], T]) -> T:
        """Calls `what` on the agents' own thread."""

        async def on_loop() -> T:
            return what()

        return self.run(on_loop())

    def trainer(self, *, ranks: tuple[int, ...] = (0,), world: int = 1, run_id: str = "run-1") -> FakeAgent:
        facts = TrainerFacts(run_id=run_id, ranks=ranks, world_size=world)
        return self._add(AgentState(role="trainer", trainer=facts, **_anew()))

    def inference(self, *, workers: int = 1) -> FakeAgent:
        facts = InferenceFacts(workers=workers, closed_because="waits for the operator")
        return self._add(AgentState(role="inference", inference=facts, **_anew()))

    def _add(self, state: AgentState) -> FakeAgent:
        async def make() -> FakeAgent:
            agent = FakeAgent(self, state, "")
            await agent.start()
            return agent

        agent = self.run(make())
        self.agents.append(agent)
        return agent

    def publish(self, version: str, sequence: int, *trainers: FakeAgent) -> None:
        def on_loop() -> None:
            for agent in trainers:
                assert agent.state.trainer is not None
                fresh = agent.state.trainer.model_copy(
                    update={"published": Published(version=version, sequence=sequence)}
                )
                agent.update(trainer=fresh)

        self.change(on_loop)

    def restart(self, agent: FakeAgent) -> None:
        """Another process takes the place of the agent's, at the same address; it knows nothing."""

        async def anew() -> None:
            port = agent.port
            await agent.stop()
            fields: dict[str, Any] = {
                "boot_id": uuid.uuid4().hex,
                "revision": 1,
                "epoch": None,
                "round": None,
            }
            if agent.state.inference is not None:
                fields["inference"] = InferenceFacts(workers=agent.state.inference.workers)
            agent.state = agent.state.model_copy(update=fields)
            agent.term = 0
            await agent.start(port)

        self.run(anew())

    def close(self) -> None:
        for agent in self.agents:
            self.run(agent.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def _anew() -> dict[str, Any]:
    return {"boot_id": uuid.uuid4().hex, "pod_name": "", "revision": 1}


def eventually(what: Callable[[], T], *, within: float = 20.0, every: float = 0.05) -> T:
    """The first true value of `what`; AssertionError with the last one after `within` seconds."""
    end = time.monotonic() + within
    while not (value := what()):
        if time.monotonic() > end:
            raise AssertionError(f"still {value!r} after {within:.0f} s")
        time.sleep(every)
    return value


__all__ = ["FakeAgent", "Fleet", "Script", "eventually", "field"]
