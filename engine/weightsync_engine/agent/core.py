"""`AgentCore`: owns the session, carries out its effects, and lets the HTTP routes read and wait.

All of it runs on one event loop. Nothing here blocks that loop, and every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Literal, Protocol

from ..mover.client import MoverClient, MoverGone
from ..protocol import session as machine
from ..protocol.messages import Addressed, AgentState, FlipPolicy, Problem, Refusal, Rendezvous
from ..protocol.mover import MoverLeave
from ..protocol.names import ENV_POD_IP, ENV_POD_NAME, ENV_POD_UID
from ..protocol.session import DecisionAnswer, DecisionQuery, Pod, Session
from .decision import ask_decision

log = logging.getLogger(__name__)

LIVE_EVERY_SECONDS = 15.0
"""How often an inference agent asks the workers what they hold, apart from every flip."""
LOOK_SECONDS = 1.0
"""How often an agent looks whether its movers are heard."""
LIVE_SECONDS = 10.0
"""Deadline of that question."""
FLIP_GRACE_SECONDS = 5.0
"""Beyond the flip's own deadline, before the agent stops waiting for the server."""
STORE_SECONDS = 120.0
"""Upper bound on opening a store, imports included; the epoch's own deadline ends it earlier."""
END_SECONDS = 15.0
"""Deadline of ending all requests of the server, and of letting its scheduler go on."""
ASK_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
"""Progress alone wakes long polls at most this often."""
CLOSE_SECONDS = 5.0


class Server(Protocol):
    """The vLLM server beside an inference agent."""

    @property
    def workers(self) -> int:
        """Ranks that this server takes in an epoch."""

    @property
    def problem(self) -> Problem | None:
        """Why this server cannot take part at all."""

    @property
    def held(self) -> bool:
        """Whether the scheduler stands still since `hold`."""

    async def flip(self, flip: machine.Flip) -> Problem | None:
        """Make the shadow live in every worker, between two steps. Idempotent; None: all have. One that fails leaves a
        held scheduler held."""

    async def hold(self, policy: FlipPolicy, deadline_seconds: float) -> Problem | None:
        """Stop the scheduler until `go_on`, `end_requests` or a flip. With a problem, or cancelled, it goes on."""

    async def go_on(self) -> None:
        """Let a held scheduler go on; nothing otherwise."""

    async def end_requests(self) -> Problem | None:
        """The guard is closed: end what runs, and let the scheduler go on. None: nothing runs any more."""

    async def live(self) -> tuple[str | None, bool]:
        """The version that all workers hold (None: as loaded at start), and whether they are torn."""


class Store(Protocol):
    """An open epoch store."""

    @property
    def port(self) -> int: ...

    def close(self) -> None: ...


StoreOpener = Callable[[str], Store]
"""Opens a store that listens on this address alone; blocking: it is called in a thread."""

Ask = Callable[[machine.AskDecision, float], Awaitable[machine.Verdict]]


class RequestRefused(Exception):
    """The session refused a request; answered with 409."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class AgentCore:
    """One pod's agent. `await start()`, serve `routes(core, verifier)`, `await close()`.

    `mover_sockets`: one path for each local rank, fixed for the pod's life: a mover that takes the place of
    another binds the same path. `server`: the vLLM server, for the role inference. `open_store`: for the
    trainer pod that hosts rank 0.
    """

    def __init__(
        self,
        pod: Pod,
        mover_sockets: Sequence[str | os.PathLike[str]],
        server: Server | None = None,
        *,
        open_store: StoreOpener | None = None,
        ask: Ask = ask_decision,
    ) -> None:
        if len(mover_sockets) != pod.local_ranks:
            raise ValueError(f"{len(mover_sockets)} mover sockets for {pod.local_ranks} local ranks")
        if (pod.role == "inference") != (server is not None):
            raise ValueError(f"role {pod.role} and server {server!r} do not go together")
        self.session = Session(pod)
        self.revision = 1
        self._server = server
        self._open_store = open_store
        self._ask = ask
        self._clients = [MoverClient(Path(path), self._on_mover(i)) for i, path in enumerate(mover_sockets)]
        self._known: dict[int, str] = {}
        self._stores: dict[int, Store] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._holding: asyncio.Task[None] | None = None
        self._server_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._progress_timer: asyncio.TimerHandle | None = None
        self._last_progress = 0.0
        self._shown = self._state()
        self._closed = False

    # -- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the movers and, for inference, begin to watch what the workers hold."""
        for client in self._clients:
            client.start()
        self._spawn(self._watch_movers(), "watch-movers")
        if self._server is not None:
            self._spawn(self._watch_live(), "watch-live")

    async def close(self) -> None:
        """Let go of everything within `CLOSE_SECONDS`; the movers stay. Idempotent."""
        self._closed = True
        for timer in (self._timer, self._progress_timer):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        if self._server is not None and self._server.held:
            # The others may have flipped by now: what runs here must not go on, and nothing stays stopped.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.end_requests(), CLOSE_SECONDS)
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)
        for epoch in tuple(self._stores):
            self._close_store(epoch)
        self._changed.set()

    # -- what the routes and the guard read ------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Whether generation may pass (inference).

        A server that cannot take part may serve what it loaded, if the operator admits that; it is not ready.
        """
        return self.session.guard.open and not self._closed

    @property
    def closed_because(self) -> str:
        """What is waited for, in words, while not serving."""
        if self.problem is not None:
            return self.problem.message
        if self.serving:
            return ""
        return "the agent is closing" if self._closed else self.session.guard.because

    @property
    def ready(self) -> bool:
        """What /readyz says: inference serves; a trainer's agent is alive."""
        if self.session.pod.role != "inference":
            return not self._closed
        return self.serving and self.problem is None

    @property
    def problem(self) -> Problem | None:
        return None if self._server is None else self._server.problem

    def _state(self) -> AgentState:
        state = machine.agent_state(self.session, self.revision, self.problem)
        if state.inference is not None and self._server is not None and self._server.problem is not None:
            facts = {"closed_because": self._server.problem.message}
            return state.model_copy(update={"inference": state.inference.model_copy(update=facts)})
        return state

    def state(self) -> AgentState:
        """The whole state, at its present revision."""
        self._bump()
        return self._state()

    async def wait_state(self, seen: int | None, wait: float) -> AgentState:
        """The state once its revision differs from `seen`, or after `wait` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while (state := self.state()).revision == seen and not self._closed:
            left = deadline - loop.time()
            if left <= 0:
                break
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        return state

    def decision(self, query: DecisionQuery) -> DecisionAnswer | None:
        """Answer a verified pod; None: it does not know the epoch's key."""
        return machine.answer_decision(self.session, query)

    def post(self, request: Addressed) -> AgentState:
        """Take one request of the operator. Raises `RequestRefused`."""
        answer = machine.handle(self.session, request, self._now())
        if isinstance(answer, machine.Refused):
            log.info("refused %s: %s", type(request).__name__, answer.refusal.message)
            raise RequestRefused(answer.refusal)
        log.info("%s accepted (term %d)", type(request).__name__, request.term)
        self._apply(answer.session, answer.effects)
        return self.state()

    # -- the machine -----------------------------------------------------------------------------------------

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _observe(self, event: machine.Event) -> None:
        if not self._closed:
            self._apply(*machine.observe(self.session, event, self._now()))

    def _apply(self, session: Session, effects: tuple[machine.Effect, ...]) -> None:
        before, self.session = self.session, session
        _log_changes(before, session)
        for effect in effects:
            self._carry_out(effect)
        self._bump()
        self._arm()

    def _bump(self) -> None:
        """A new revision if anything that is shown has changed; for progress alone, now and then."""
        now, shown = self._state(), self._shown
        if now == shown:
            return
        if _without_progress(now) == _without_progress(shown):
            loop = asyncio.get_running_loop()
            wait = self._last_progress + PROGRESS_SECONDS - loop.time()
            if wait > 0:
                if self._progress_timer is None:
                    self._progress_timer = loop.call_later(wait, self._progress_due)
                return
            self._last_progress = loop.time()
        self.revision += 1
        self._shown = self._state()
        self._changed.set()
        self._changed = asyncio.Event()

    def _progress_due(self) -> None:
        self._progress_timer = None
        self._bump()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = machine.next_deadline(self.session)
        if due is not None and not self._closed:
            self._timer = asyncio.get_running_loop().call_at(due, self._observe, machine.TimePassed())

    def _on_mover(self, local_rank: int) -> Callable[[MoverClient], None]:
        def changed(client: MoverClient) -> None:
            state, known = client.state, self._known.get(local_rank)
            if known is not None and (state is None or state.mover_id != known):
                del self._known[local_rank]
                self._observe(machine.MoverLost(local_rank, known))
            if state is not None:
                self._known[local_rank] = state.mover_id
                self._observe(machine.MoverReported(local_rank, state))

        return changed

    # -- effects ---------------------------------------------------------------------------------------------

    def _carry_out(self, effect: machine.Effect) -> None:
        match effect:
            case machine.JoinMover(local_rank, message) | machine.StartTransfer(local_rank, message):
                # A mover that is gone is told of by its client, and the session draws the conclusion.
                with contextlib.suppress(MoverGone):
                    self._clients[local_rank].send(message)
            case machine.TellOutcome(local_ranks, message):
                for local_rank in local_ranks:
                    with contextlib.suppress(MoverGone):
                        self._clients[local_rank].send(message)
            case machine.LeaveMovers(epoch):
                for client in self._clients:
                    with contextlib.suppress(MoverGone):
                        client.send(MoverLeave(epoch=epoch))
            case machine.KillMovers(movers, why):
                for local_rank, mover_id in movers:
                    client = self._clients[local_rank]
                    if client.state is not None and client.state.mover_id == mover_id:
                        log.warning("killing the mover of local rank %d: %s", local_rank, why)
                        client.kill()
            case machine.OpenStore(epoch):
                self._spawn(self._open(epoch), f"open-store-{epoch}")
            case machine.CloseStore(epoch):
                self._close_store(epoch)
            case machine.Flip():
                self._spawn(self._flip(effect), f"flip-{effect.version}")
            case machine.Hold():
                self._holding = self._spawn(self._hold(effect), f"hold-{effect.round}")
            case machine.GoOn():
                self._stop_holding()
                self._spawn(self._go_on(), "go-on")
            case machine.EndRequests():
                self._stop_holding()
                self._spawn(self._end_requests(effect), "end-requests")
            case machine.AskLive(epoch, round_):
                self._spawn(self._settle(epoch, round_), f"settle-{round_}")
            case machine.AskDecision():
                self._spawn(self._learn(effect), f"ask-{effect.round}")
            case machine.OpenGuard(version):
                log.info("serving %s", version or "the weights loaded at start")
            case machine.CloseGuard(because):
                log.warning("not serving: %s", because)

    def _stop_holding(self) -> None:
        """A hold that still waits for requests to end is not waited for."""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s failed", task.get_name(), exc_info=task.exception())

    async def _open(self, epoch: int) -> None:
        host = self.session.pod.host
        if self._open_store is None:
            problem = Problem(
                reason="NoStore", message=f"pod {self.session.pod.name} cannot open an epoch store"
            )
            self._observe(machine.StoreFailed(epoch, problem))
            return
        opening = asyncio.ensure_future(asyncio.to_thread(self._open_store, host))
        try:
            store = await asyncio.wait_for(asyncio.shield(opening), STORE_SECONDS)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_when_open)
            raise
        except Exception as e:
            opening.add_done_callback(_close_when_open)
            message = f"the store cannot listen on {host}: {type(e).__name__}: {e}"[:1024]
            problem = Problem(reason="StoreFailed", message=message, rank=0)
            self._observe(machine.StoreFailed(epoch, problem))
            return
        self._stores[epoch] = store
        self._observe(machine.StoreOpened(epoch, Rendezvous(host=host, port=store.port)))

    def _close_store(self, epoch: int) -> None:
        if (store := self._stores.pop(epoch, None)) is not None:
            try:
                store.close()
            except Exception:
                log.exception("closing the store of epoch %d", epoch)

    async def _flip(self, flip: machine.Flip) -> None:
        assert self._server is not None
        problem: Problem | None
        async with self._server_lock:
            try:
                problem = await asyncio.wait_for(
                    self._server.flip(flip), flip.deadline_seconds + FLIP_GRACE_SECONDS
                )
            except TimeoutError:
                message = (
                    f"the workers of pod {self.session.pod.name} did not flip in {flip.deadline_seconds:g} s"
                )
                problem = Problem(reason="FlipTimeout", message=message)
            except Exception as e:
                log.exception("the flip to %s failed", flip.version)
                problem = Problem(reason="FlipFailed", message=f"{type(e).__name__}: {e}"[:1024])
            live, torn = self.session.live, self.session.torn
            try:
                live, torn = await asyncio.wait_for(self._server.live(), LIVE_SECONDS)
            except Exception as e:
                message = f"after the flip the workers do not say what they hold: {type(e).__name__}: {e}"
                problem = problem or Problem(reason="LiveUnknown", message=message[:1024])
            self._observe(machine.FlipEnded(flip.epoch, flip.round, problem, live, torn))

    async def _hold(self, hold: machine.Hold) -> None:
        assert self._server is not None
        problem: Problem | None
        async with self._server_lock:
            try:
                problem = await asyncio.wait_for(
                    self._server.hold(hold.policy, hold.deadline_seconds),
                    hold.deadline_seconds + FLIP_GRACE_SECONDS,
                )
            except TimeoutError:
                message = (
                    f"pod {self.session.pod.name} did not stop its scheduler in {hold.deadline_seconds:g} s: "
                    "look at its log; a worker that hangs needs a restart of the pod"
                )
                problem = Problem(reason="HaltTimeout", message=message)
            except Exception as e:
                log.exception("stopping the scheduler failed")
                problem = Problem(reason="HaltFailed", message=f"{type(e).__name__}: {e}"[:1024])
            self._observe(machine.HoldEnded(hold.epoch, hold.round, problem))

    async def _go_on(self) -> None:
        assert self._server is not None
        async with self._server_lock:
            await asyncio.wait_for(self._server.go_on(), END_SECONDS)

    async def _end_requests(self, effect: machine.EndRequests) -> None:
        assert self._server is not None
        problem: Problem | None
        async with self._server_lock:
            try:
                problem = await asyncio.wait_for(self._server.end_requests(), END_SECONDS)
            except TimeoutError:
                message = (
                    f"pod {self.session.pod.name} did not end its requests in {END_SECONDS:g} s: restart it"
                )
                problem = Problem(reason="HaltTimeout", message=message)
            except Exception as e:
                log.exception("ending the requests failed")
                problem = Problem(reason="HaltFailed", message=f"{type(e).__name__}: {e}"[:1024])
        if problem is not None:
            log.error("halted in vain: %s", problem.message)
        self._observe(machine.RequestsEnded(effect.mark, problem))

    async def _settle(self, epoch: int, round_: int) -> None:
        """What the workers hold after a transfer in place that failed; torn if they do not say."""
        assert self._server is not None
        live, torn = self.session.live, True
        async with self._server_lock:
            try:
                live, torn = await asyncio.wait_for(self._server.live(), LIVE_SECONDS)
            except Exception as e:
                log.warning("the workers do not say what they hold: %s: %s", type(e).__name__, e)
            self._observe(machine.Settled(epoch, round_, live, torn))

    async def _watch_live(self) -> None:
        """Read what the workers hold, now and then: a fact of theirs, which others may change."""
        assert self._server is not None
        while True:
            known = self.session.live_known
            try:
                async with self._server_lock:
                    live, torn = await asyncio.wait_for(self._server.live(), LIVE_SECONDS)
                    self._observe(machine.LiveObserved(live, torn))
                    known = True
            except Exception as e:
                log.warning("the workers do not say what they hold: %s: %s", type(e).__name__, e)
            await asyncio.sleep(LIVE_EVERY_SECONDS if known else 1.0)

    async def _watch_movers(self) -> None:
        """Replace a mover that is frozen while nothing is asked of it: it would not tell of the next version."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for local_rank, client in enumerate(self._clients):
                if client.look():
                    log.warning("killing the mover of local rank %d: it is frozen or starved", local_rank)
                    client.kill()

    async def _learn(self, ask: machine.AskDecision) -> None:
        verdict: machine.Verdict = "unknown"
        try:
            verdict = await asyncio.wait_for(self._ask(ask, ASK_SECONDS), ASK_SECONDS)
        except Exception as e:
            log.warning("no decision from %s:%d: %s: %s", ask.lead.host, ask.lead.port, type(e).__name__, e)
        self._observe(machine.DecisionLearnt(ask.epoch, ask.round, verdict))


def _close_when_open(opening: asyncio.Future[Store]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _without_progress(state: AgentState) -> AgentState:
    if state.round is None:
        return state
    return state.model_copy(update={"round": state.round.model_copy(update={"bytes_done": 0})})


def _log_changes(before: Session, after: Session) -> None:
    old = (before.epoch.request.epoch, before.epoch.phase) if before.epoch else None
    if after.epoch is not None and old != (after.epoch.request.epoch, after.epoch.phase):
        problem = f": {after.epoch.problem.message}" if after.epoch.problem else ""
        log.info("epoch %d is %s%s", after.epoch.request.epoch, after.epoch.phase, problem)
    was = (before.round.epoch, before.round.round, before.round.phase) if before.round else None
    now = after.round
    if now is not None and was != (now.epoch, now.round, now.phase):
        problem = f": {now.problem.message}" if now.problem else ""
        log.info("round %d of epoch %d (%s) is %s%s", now.round, now.epoch, now.version, now.phase, problem)


def pod_address() -> str:
    """The pod's own address: from the environment, else what the host name resolves to."""
    host = os.environ.get(ENV_POD_IP, "").strip()
    if host:
        return host
    name = socket.gethostname()
    try:
        found = [str(i[4][0]) for i in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError as e:
        raise RuntimeError(
            f"the host name {name!r} does not resolve ({e}): set {ENV_POD_IP} to status.podIP"
        ) from None
    outside = [h for h in found if not h.startswith("127.") and h != "::1"]
    return (outside or found)[0]


def make_pod(
    role: Literal["trainer", "inference"],
    boot_id: str,
    local_ranks: int,
    *,
    run_id: str = "",
    trainer_ranks: tuple[int, ...] = (),
    trainer_world: int = 0,
    in_place: bool = False,
) -> Pod:
    """What this pod is, from the environment that the downward API fills."""
    return Pod(
        role=role,
        boot_id=boot_id,
        name=os.environ.get(ENV_POD_NAME) or socket.gethostname(),
        uid=os.environ.get(ENV_POD_UID) or None,
        host=pod_address(),
        local_ranks=local_ranks,
        run_id=run_id,
        trainer_ranks=trainer_ranks,
        trainer_world=trainer_world,
        in_place=in_place,
    )
