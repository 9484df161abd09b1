"""The mover process: `python -m weightsync_engine.mover <slab descriptor>`, started by `MoverSupervisor`
only.

It imports what it needs, waits for one line of configuration on stdin, maps the slab and listens on its
socket. Its life hangs on stdin: at the end of it the process leaves by itself. Three threads: the event loop
serves the socket, one thread reads stdin, one does joins and transfers. Whatever fails in a join or a
transfer becomes a `Problem` in the state; the process itself goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ..digest import warm_up
from ..layout.codec import decode_trainer, decode_worker
from ..layout.tensors import TrainerManifest, WorkerManifest
from ..protocol.messages import EpochPhase, Problem, RoundPhase
from ..protocol.mover import (
    MoverEpoch,
    MoverJoin,
    MoverOutcome,
    MoverRequest,
    MoverRound,
    MoverState,
    MoverTransfer,
)
from ..transport.failure import Failure
from .epoch import Epoch
from .memory import Staging
from .slab import Slab

log = logging.getLogger(__name__)

LEAVE_SECONDS = 2.0
"""How long the process stays after its parent has let go; a child that vanishes at once upsets vLLM's
shutdown."""
PROGRESS_SECONDS = 0.05
STAGING_SECONDS = 10.0
"""How long a killed predecessor's memory may take to come back."""
TELL_SECONDS = 0.3
"""How long a mover that must end lets its driver hear why."""
HOPELESS = 75
"""Exit status of one."""
ALIVE_SECONDS = 2.0
"""How often a mover of which nothing is new tells its state again: one that does not is frozen."""
OVERDUE_SECONDS = 2.0
"""How long after its deadline work that does not end is reported as stuck."""
_REQUEST: TypeAdapter[MoverRequest] = TypeAdapter(MoverRequest)
_LINE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Config:
    role: str
    local_rank: int
    socket: str
    staging_bytes: int
    manifest: TrainerManifest | WorkerManifest


def read_config(line: bytes) -> Config:
    """Raises ValueError, or KeyError, for a line that the supervisor did not write."""
    data = json.loads(line)
    manifest = json.dumps(data["manifest"]).encode()
    decoded = decode_trainer(manifest) if data["role"] == "trainer" else decode_worker(manifest)
    return Config(
        data["role"], int(data["local_rank"]), str(data["socket"]), int(data["staging_bytes"]), decoded
    )


def problem_of(error: BaseException) -> Problem:
    """What an exception says to the person who reads the object's condition."""
    if isinstance(error, Failure):
        return error.problem
    return Problem(reason="MoverError", message=f"{type(error).__name__}: {error}"[:1024])


class Mover:
    """State and work of one mover. `on_change` is called in any thread after each change of `state`."""

    def __init__(self, config: Config, slab: Slab, staging: Staging | None = None) -> None:
        self.config = config
        self.slab = slab
        self._staging = staging or Staging(None, 0)
        self.on_change: Callable[[], None] = lambda: None
        self.on_outcome: Callable[[MoverOutcome], None] = lambda outcome: None
        snapshot = slab.read_stamp() if config.role == "trainer" else None
        self._state = MoverState(
            mover_id=uuid.uuid4().hex, pid=os.getpid(), local_rank=config.local_rank, snapshot=snapshot
        )
        self._lock = threading.RLock()
        self._last_work = threading.Event()
        self._last_work.set()
        self._epoch: Epoch | None = None  # the one that the state speaks of; touched under the lock
        self._pushed = 0.0
        self._following = False  # a thread waits for the end of the copy; under the lock

    @property
    def state(self) -> MoverState:
        return self._state

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self._state = self._state.model_copy(update=changes)
        self.on_change()

    def published(self) -> None:
        """The parent says that the slab has a new stamp."""
        if self.config.role != "trainer":
            return
        with self._lock:
            copying = self.slab.copying  # asked first: the copy may end between the two questions
            self._set(snapshot=self.slab.read_stamp())
            if self._state.snapshot is not None or not copying or self._following:
                return
            self._following = True
        threading.Thread(target=self._follow, name="stamp", daemon=True).start()

    def _follow(self) -> None:
        """Tell of the stamp once the trainer's stream has written it, however long its work before takes."""
        while True:
            stamp = self.slab.wait_stamp(1.0)
            with self._lock:
                if stamp is not None or not self.slab.copying:
                    self._following = False
                    self._set(snapshot=self.slab.read_stamp())
                    return

    def handle(self, request: MoverJoin | MoverTransfer | MoverOutcome | Any) -> None:
        """Take a request; never blocks. A repeated or older one changes nothing."""
        with self._lock:
            if isinstance(request, MoverOutcome):
                self.on_outcome(request)
            elif isinstance(request, MoverJoin):
                self._join(request)
            elif isinstance(request, MoverTransfer):
                self._transfer(request)
            elif self._state.epoch is not None and self._state.epoch.epoch == request.epoch:
                self._drop()
                self._set(epoch=None, round=None)

    def _drop(self) -> None:
        """Let go of the current epoch: its waits end soon, and what it holds is freed behind the last of its
        work."""
        if self._epoch is not None:
            self._epoch.cancel()
            self._start(self._epoch.close, 0.0, None)
            self._epoch = None

    def _start(self, work: Callable[[], None], seconds: float, overdue: Callable[[], None] | None) -> None:
        """Do `work` in a thread of its own, after all earlier work; call `overdue` if it is not done in time.

        A thread of its own, because earlier work may hang for ever in a store or a socket that is frozen;
        what waits for it says so at its own deadline, and the driver then kills this process.
        """
        before, done = self._last_work, threading.Event()
        self._last_work = done

        def run() -> None:
            before.wait()
            try:
                work()
            except Exception:
                log.exception("the mover's work failed")
            finally:
                done.set()

        def watch() -> None:
            if overdue is not None and not done.wait(seconds):
                overdue()

        threading.Thread(target=run, name="work", daemon=True).start()
        if overdue is not None:
            threading.Thread(target=watch, name="watch", daemon=True).start()

    def _join(self, request: MoverJoin) -> None:
        old = self._state.epoch
        if (
            old is not None
            and old.object_uid == request.object_uid
            and (request.term, request.epoch) <= (old.term, old.epoch)
        ):
            return
        self._drop()
        self._set(
            epoch=MoverEpoch(
                object_uid=request.object_uid,
                term=request.term,
                epoch=request.epoch,
                phase=EpochPhase.JOINING,
                reusable=True,
            ),
            round=None,
        )
        epoch = Epoch(request, self.config.manifest, self.slab, self._staging)
        self._epoch = epoch
        limit = request.deadline_seconds + OVERDUE_SECONDS
        self._start(lambda: self._run_join(epoch), limit, lambda: self._join_overdue(epoch))

    def _run_join(self, epoch: Epoch) -> None:
        if epoch.cancelled:
            return
        try:
            plan = epoch.join(lambda: self._tied_to(epoch))
        except BaseException as e:
            self._epoch_failed(epoch, e)
            return
        with self._lock:
            if self._epoch is epoch and self._state.epoch is not None:
                self._set(
                    epoch=self._state.epoch.model_copy(update={"phase": EpochPhase.JOINED, "plan": plan})
                )

    def _tied_to(self, epoch: Epoch) -> None:
        """From here on this process may hang in the epoch for ever: no other one can use it."""
        with self._lock:
            if self._epoch is epoch and self._state.epoch is not None:
                self._set(epoch=self._state.epoch.model_copy(update={"reusable": False}))

    def _epoch_failed(self, epoch: Epoch, error: BaseException) -> None:
        with self._lock:
            if self._epoch is epoch and self._state.epoch is not None:
                log.warning(
                    "epoch %d failed: %s", epoch.request.epoch, error, exc_info=not isinstance(error, Failure)
                )
                if self._state.epoch.phase == EpochPhase.FAILED:
                    return
                failed = {"phase": EpochPhase.FAILED, "problem": problem_of(error)}
                self._set(epoch=self._state.epoch.model_copy(update=failed))

    def _transfer(self, request: MoverTransfer) -> None:
        last = self._state.round
        if last is not None and (last.epoch, last.round) >= (request.epoch, request.round):
            return
        epoch, state = self._epoch, self._state.epoch
        reason = ""
        if epoch is None or state is None or state.epoch != request.epoch:
            reason = (
                f"this rank is in {f'epoch {state.epoch}' if state else 'no epoch'}, not in {request.epoch}"
            )
        elif state.phase != EpochPhase.JOINED:
            reason = f"this rank's epoch {request.epoch} is {state.phase.value}, not joined"
        elif last is not None and last.phase == RoundPhase.TRANSFERRING:
            reason = f"round {last.round} is still running here and cannot be cancelled: kill this mover"
        first = MoverRound(
            epoch=request.epoch, round=request.round, version=request.version, phase=RoundPhase.TRANSFERRING
        )
        if reason or epoch is None:
            problem = Problem(reason="NotJoined", message=reason)
            self._set(round=first.model_copy(update={"phase": RoundPhase.FAILED, "problem": problem}))
            return
        self._set(round=first)
        limit = request.deadline_seconds + OVERDUE_SECONDS
        self._start(
            lambda: self._run_transfer(epoch, request), limit, lambda: self._transfer_overdue(epoch, request)
        )

    def _run_transfer(self, epoch: Epoch, request: MoverTransfer) -> None:
        if epoch.cancelled:
            return
        started = time.monotonic()
        changes: dict[str, Any]
        try:
            epoch.transfer(request, lambda **now: self._progress(epoch, request, now))
            changes = {"phase": RoundPhase.VERIFIED, "content": epoch.content}
        except BaseException as e:
            log.warning("round %d failed: %s", request.round, e, exc_info=not isinstance(e, Failure))
            changes = {"phase": RoundPhase.FAILED, "problem": problem_of(e)}
            if not epoch.usable:
                self._epoch_failed(epoch, e)
        changes["seconds"] = time.monotonic() - started
        self._round_changed(epoch, request, {**epoch.progress, **changes})
        if epoch.hopeless:
            log.error("work is stuck on the GPU for ever: this mover ends, so that its spare takes over")
            threading.Timer(TELL_SECONDS, os._exit, (HOPELESS,)).start()

    def _join_overdue(self, epoch: Epoch) -> None:
        self._tied_to(epoch)
        self._epoch_failed(epoch, _overdue("join"))

    def _transfer_overdue(self, epoch: Epoch, request: MoverTransfer) -> None:
        error = _overdue("transfer")
        self._epoch_failed(epoch, error)
        self._round_changed(epoch, request, {"phase": RoundPhase.FAILED, "problem": problem_of(error)})

    def _progress(self, epoch: Epoch, request: MoverTransfer, now: dict[str, Any]) -> None:
        if time.monotonic() - self._pushed >= PROGRESS_SECONDS:
            self._pushed = time.monotonic()
            self._round_changed(epoch, request, now)

    def _round_changed(self, epoch: Epoch, request: MoverTransfer, changes: dict[str, Any]) -> None:
        """Change the round's state, unless it has ended or the epoch is no longer this one."""
        with self._lock:
            now = self._state.round
            if self._epoch is not epoch or now is None or now.round != request.round:
                return
            if now.phase == RoundPhase.TRANSFERRING:
                self._set(round=now.model_copy(update=changes))


def _overdue(what: str) -> Failure:
    return Failure(
        "MoverStuck",
        f"the mover's {what} did not end by its deadline: the epoch's store or a peer is frozen; kill it",
    )


class _Server:
    """Pushes the mover's state to every connected driver, coalesced for slow ones and repeated every `ALIVE_SECONDS`;
    takes their requests."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.loop = asyncio.get_running_loop()
        self.changed: set[asyncio.Event] = set()
        mover.on_change = self._changed

    def _changed(self) -> None:
        self.loop.call_soon_threadsafe(self._mark)

    def _mark(self) -> None:
        for event in self.changed:
            event.set()

    async def serve(self, path: str) -> asyncio.AbstractServer:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # a predecessor's: there is one mover for a path, and it is this one now
        return await asyncio.start_unix_server(self._connection, path, limit=_LINE_LIMIT)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()):
            log.warning("refused a driver of user %d", uid)
            writer.close()
            return
        event = asyncio.Event()
        event.set()
        self.changed.add(event)
        pusher = asyncio.create_task(self._push(event, writer))
        try:
            async for line in reader:
                self.mover.handle(_REQUEST.validate_json(line))
        except (OSError, ValueError) as e:
            log.warning("dropped a driver: %s", e)
        finally:
            self.changed.discard(event)
            pusher.cancel()
            writer.close()

    async def _push(self, event: asyncio.Event, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                if (
                    not event.is_set()
                ):  # else at once: a driver that errs hears who it talks to before it is dropped
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(event.wait(), ALIVE_SECONDS)
                event.clear()
                writer.write(self.mover.state.model_dump_json().encode() + b"\n")
                await writer.drain()


def _parent_watch(parent: int, gone: Callable[[], None]) -> None:
    """stdin does not end while a fork of the parent holds the pipe's other end; a changed parent tells as
    well."""
    while os.getppid() == parent:
        time.sleep(1.0)
    gone()


def _leave(path: Path | None, inode: int) -> None:
    time.sleep(LEAVE_SECONDS)
    if path is not None:
        with contextlib.suppress(OSError):
            if path.stat().st_ino == inode:
                path.unlink()
    os._exit(0)  # not sys.exit: no destructor of a communicator may keep a process that nobody waits for


def _write_outcomes(outcomes: queue.SimpleQueue[bytes], fd: int) -> None:
    while True:
        data = outcomes.get()
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(fd, data) :]


def _warm_up(slab: Slab) -> None:
    """All that the first round would otherwise wait for: torch's part of the context, kernels, compilers."""
    torch.cuda.set_device(slab.device)
    warm_up(slab.device)


def _say_problem(fd: int, message: str) -> None:
    os.write(fd, b"problem " + json.dumps(message[:900]).encode() + b"\n")


def _name_process(name: str) -> None:
    """What `ps -o comm` and `pkill -x` show: 15 characters at most."""
    Path("/proc/self/comm").write_text(name)


def main() -> int:
    """Entry of the process; the descriptor of the slab is its only argument."""
    parent = os.getppid()
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"weightsync mover {os.getpid()}: %(levelname)s %(message)s",
    )
    # What any library prints must not reach the parent's protocol.
    outcome_fd = os.dup(1)
    os.dup2(2, 1)
    _name_process("ws-spare")
    try:
        slab = Slab.attach(int(sys.argv[1]))
        if slab.device.type == "cuda":
            _warm_up(slab)
    except Exception as e:
        log.exception("the slab cannot be used")
        _say_problem(outcome_fd, f"{type(e).__name__}: {e}")
        return 1
    os.write(outcome_fd, b"ready\n")
    # A spare stands here, all imports done, until it is needed or its parent goes.
    stdin = sys.stdin.buffer
    line = stdin.readline()
    if not line.endswith(b"\n"):
        time.sleep(LEAVE_SECONDS)
        return 0
    config = read_config(line)
    _name_process(f"ws-mover-{config.local_rank}")
    staging = Staging(slab.gpu, config.staging_bytes)
    if why := staging.hold(STAGING_SECONDS):
        _say_problem(outcome_fd, why)
        return 1
    mover = Mover(config, slab, staging)
    outcomes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    mover.on_outcome = lambda outcome: outcomes.put(outcome.model_dump_json().encode() + b"\n")
    threading.Thread(
        target=_write_outcomes, args=(outcomes, outcome_fd), name="outcomes", daemon=True
    ).start()

    path = Path(config.socket)

    async def run() -> None:
        server = await _Server(mover).serve(config.socket)

        inode = os.stat(path).st_ino

        def gone() -> None:
            _leave(path, inode)

        def read_parent() -> None:
            for word in stdin:
                if word == b"published\n":
                    mover.published()
            gone()

        threading.Thread(target=read_parent, name="stdin", daemon=True).start()
        threading.Thread(target=_parent_watch, args=(parent, gone), name="parent", daemon=True).start()
        outcomes.put(b"up\n")
        async with server:
            await server.serve_forever()

    asyncio.run(run())
    return 0
