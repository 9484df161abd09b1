"""The driver's side of a mover's socket (asyncio): for the agent, or a worker that drives its own mover."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..protocol.messages import EpochPhase, Problem, RoundPhase
from ..protocol.mover import MoverJoin, MoverLeave, MoverOutcome, MoverState, MoverTransfer

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
_LINE_LIMIT = 1 << 20
_UP_SECONDS = 30.0
"""For a mover that is just being replaced."""
SILENT_LOOKS = 10
"""A mover tells its state every 2 s at least."""
_BEYOND_SECONDS = 5.0
"""Left to a mover beyond its deadline, so that its own, more exact message wins."""


class MoverGone(ConnectionError):
    """No mover is connected: it died, or its parent has not started one yet."""


@dataclass(frozen=True)
class Lost:
    """A connection that ended. The mover died, or is dying."""

    state: MoverState
    """The last that was heard of it."""
    at: float
    """Loop time (seconds) of the loss."""


class MoverClient:
    """Follows whatever mover listens at `path`: connects for ever until closed, keeps its newest state.

    Use inside a running event loop: `async with MoverClient(path) as client`, or `start()` and `await
    close()`.
    """

    def __init__(
        self, path: str | os.PathLike[str], on_change: Callable[[MoverClient], None] | None = None
    ) -> None:
        self.path = Path(path)
        self.on_change = on_change
        self.state: MoverState | None = None
        """The connected mover's newest state; None while none is connected."""
        self.silent = 0
        """How often `look` was called since the connected mover was heard."""
        self.lost: Lost | None = None
        """The connection that ended last; stays when a new mover connects (compare `mover_id`)."""
        self._writer: asyncio.StreamWriter | None = None
        self._pid: int | None = None
        self._pidfd = -1
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> MoverClient:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"mover-client {self.path.name}"
            )
        return self

    async def __aenter__(self) -> MoverClient:
        return self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; the mover stays. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def send(self, request: MoverJoin | MoverTransfer | MoverOutcome | MoverLeave) -> None:
        """Hand over a request, without waiting: its outcome is read from the state. Raises `MoverGone`."""
        if self._writer is None or self.state is None:
            raise MoverGone(f"no mover is connected at {self.path}")
        self._writer.write(request.model_dump_json().encode() + b"\n")

    def look(self) -> bool:
        """Called about once a second: whether the mover is frozen, that is, connected, free of work that has a deadline
        of its own, and not heard for `SILENT_LOOKS` calls.

        Calls are counted, not seconds: a pod that is frozen as a whole, or starved, also looks less often.
        """
        self.silent = 0 if self.state is None or _works(self.state) else self.silent + 1
        return self.silent >= SILENT_LOOKS

    def kill(self) -> bool:
        """SIGKILL the connected mover; its parent starts another one. False if none is connected any more.

        The process that is killed is the one at the other end of the socket, which the kernel names; a state
        that names another process is a `RuntimeError`, and nobody is killed.
        """
        if self.state is None or self._pid is None:
            return False
        if self.state.pid != self._pid:
            raise RuntimeError(
                f"the mover at {self.path} says it is process {self.state.pid}, the kernel {self._pid}"
            )
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            else:
                os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    async def wait_for(
        self, predicate: Callable[[MoverState | None], bool], timeout: float
    ) -> MoverState | None:
        """The first state (None: not connected) that satisfies `predicate`. Raises TimeoutError, with the
        last state."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not predicate(self.state):
            left = deadline - asyncio.get_running_loop().time()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(left, 0))
            except TimeoutError:
                raise TimeoutError(
                    f"the mover at {self.path} did not get there in {timeout:g} s; its state: {self.state!r}"
                ) from None
        return self.state

    # -- inside ----------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        # Waiters that share the event each clear it themselves before they look again; setting wakes them
        # all.
        self._changed.set()
        if self.on_change is not None:
            try:
                self.on_change(self)
            except Exception:
                log.exception("on_change of the mover client for %s failed", self.path)

    async def _run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self.path, limit=_LINE_LIMIT)
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                self._identify(writer)
                self._writer = writer
                async for line in reader:
                    self.silent = 0
                    state = MoverState.model_validate_json(line)
                    if state != self.state:
                        self.state = state
                        self._notify()
            except (OSError, ValidationError, ValueError) as e:
                log.warning("connection to the mover at %s: %s", self.path, e)
            finally:
                self._drop(writer)
            await asyncio.sleep(_RETRY_SECONDS)

    def _identify(self, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        self._pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.getuid()):
            raise OSError(f"it belongs to user {uid}, not to {os.getuid()}")
        with contextlib.suppress(OSError):  # ESRCH: gone already; ENOSYS: a sandbox without pidfds
            self._pidfd = os.pidfd_open(self._pid)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._writer, self._pid, self._pidfd = None, None, -1
        if self.state is not None:
            self.lost = Lost(self.state, asyncio.get_running_loop().time())
            self.state = None
            self._notify()


def drive(work: Coroutine[Any, Any, Problem | None], seconds: float) -> Problem | None:
    """Run `join_epoch` or `run_transfer` from a thread without an event loop; never raises."""
    try:
        return asyncio.run(asyncio.wait_for(work, seconds + _BEYOND_SECONDS))
    except TimeoutError as e:
        message = f"{str(e) or f'the mover did not answer in {seconds:g} s'}; look at its lines in this process's log"
        return Problem(reason="MoverLate", message=message[:1024])
    except Exception as e:
        return Problem(
            reason="MoverFailed", message=f"the mover cannot be driven: {type(e).__name__}: {e}"[:1024]
        )


async def join_epoch(path: Path, join: MoverJoin) -> Problem | None:
    """Have the mover at `path` join; None once it has. For who drives a mover without an agent.

    A mover that an epoch before this one left with a broken or busy communicator is replaced first.
    """
    async with MoverClient(path) as client:
        before = await client.wait_for(lambda state: state is not None, join.deadline_seconds)
        assert before is not None
        if not _free(before):
            client.kill()
            await client.wait_for(
                lambda state: state is not None and state.mover_id != before.mover_id, join.deadline_seconds
            )
        client.send(join)

        def ended(state: MoverState | None) -> bool:
            epoch = state.epoch if state is not None else None
            mine = epoch is not None and (epoch.object_uid, epoch.epoch) == (join.object_uid, join.epoch)
            joining = not mine or (epoch is not None and epoch.phase is EpochPhase.JOINING)
            return state is None or not joining

        state = await client.wait_for(ended, join.deadline_seconds)
    if state is None or state.epoch is None:
        return Problem(reason="MoverLost", message="the mover died while it joined")
    if state.epoch.phase is EpochPhase.JOINED:
        return None
    return state.epoch.problem or Problem(
        reason="JoinFailed", message="the mover left the epoch while it joined"
    )


def _free(state: MoverState) -> bool:
    broken = state.epoch is not None and state.epoch.phase is not EpochPhase.JOINED
    return not broken and not _works(state)


def _works(state: MoverState) -> bool:
    joins = state.epoch is not None and state.epoch.phase is EpochPhase.JOINING
    return joins or (state.round is not None and state.round.phase is RoundPhase.TRANSFERRING)


async def run_transfer(path: Path, transfer: MoverTransfer) -> Problem | None:
    """Have the mover at `path` run its part of a round; None once the round is verified."""
    async with MoverClient(path) as client:
        await client.wait_for(lambda state: state is not None, _UP_SECONDS)
        client.send(transfer)

        def ended(state: MoverState | None) -> bool:
            round_ = state.round if state is not None else None
            mine = round_ is not None and (round_.epoch, round_.round) == (transfer.epoch, transfer.round)
            running = not mine or (round_ is not None and round_.phase is RoundPhase.TRANSFERRING)
            return state is None or not running

        state = await client.wait_for(ended, transfer.deadline_seconds)
    if state is None or state.round is None:
        return Problem(reason="MoverLost", message="the mover died in the transfer")
    if state.round.phase is RoundPhase.VERIFIED:
        return None
    return state.round.problem or Problem(reason="TransferFailed", message="the mover left the round")
