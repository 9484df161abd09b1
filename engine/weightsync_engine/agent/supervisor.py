"""Keeps the trainer pod's agent running beside the training process, which waits for its start only."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time

from ..mover.supervisor import mover_environment
from .config import AgentConfig

log = logging.getLogger(__name__)

UP_SECONDS = 60.0
"""An agent that does not listen this long after its start is replaced."""
LOOK_SECONDS = 1.0
SILENT_LOOKS = 10
"""An agent that was not heard for so many looks in a row is frozen, and replaced. Looks are counted, not seconds: a pod
that is frozen as a whole, or starved, also looks less often."""
_BACKOFF = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_SECONDS = 10.0


class AgentSupervisor:
    """Starts the agent and replaces it whenever it ends, until `close`.

    After the first start a port of 0 stands for the port that was then given, so a successor is found at the
    same address.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.port: int | None = None
        """Where the agent listens; None until it does."""
        self.problem = ""
        """Why the agent is not up, in words; empty while it is."""
        self.pid: int | None = None
        self._config = config
        self._changed = threading.Condition()
        self._owner = os.getpid()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="weightsync-agent", daemon=True)
        self._thread.start()

    def wait_up(self, timeout: float) -> str:
        """Wait until the agent listens; why it does not, or an empty string."""
        with self._changed:
            self._changed.wait_for(lambda: self.port is not None or self.problem, timeout)
            if self.port is not None:
                return ""
            return self.problem or f"the agent did not listen within {timeout:g} s"

    def close(self) -> None:
        """Let the agent go; it leaves by itself at the end of its pipe, once the movers have. Idempotent.

        Does not wait for it: the thread reaps it, or kills it after 10 s.
        """
        if self._closing or os.getpid() != self._owner:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        deaths = 0
        while not self._closing:
            started = time.monotonic()
            try:
                self._once()
            except Exception as e:
                log.exception("the agent's supervisor failed; trying again")
                self._set(None, f"{type(e).__name__}: {e}")
            deaths = 1 if time.monotonic() - started >= _STEADY_SECONDS else deaths + 1
            if not self._closing:
                self._wait_readable(None, _BACKOFF[min(deaths, len(_BACKOFF)) - 1])
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _set(self, port: int | None, problem: str) -> None:
        with self._changed:
            self.port, self.problem = port, problem
            self._changed.notify_all()

    def _once(self) -> None:
        """One agent process, from its start to its end."""
        # -P: the working folder of a training script must not shadow modules of the agent.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weightsync_engine.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=mover_environment(os.environ),
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin is not None and process.stdout is not None
        self.pid = process.pid
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(self._config.model_dump_json().encode() + b"\n")
            why = self._follow(process)
        finally:
            self._end(process)
        if not self._closing:
            why = why or f"the agent ended with code {process.returncode}"
            log.warning("%s; starting another one", why)
            self._set(None, why)

    def _follow(self, process: subprocess.Popen[bytes]) -> str:
        """Read the agent's words until it ends. Why it failed, if it says so."""
        assert process.stdout is not None
        said, why, silent = b"", "", 0
        deadline: float | None = time.monotonic() + UP_SECONDS
        while not self._closing:
            if deadline is not None and time.monotonic() > deadline:
                return f"the agent did not listen within {UP_SECONDS:g} s of its start"
            if deadline is None and silent >= SILENT_LOOKS:
                return f"the agent was not heard for {silent * LOOK_SECONDS:g} s: it is frozen or starved"
            if not self._wait_readable(process.stdout.fileno(), LOOK_SECONDS):
                silent += 1
                continue
            silent = 0
            data = os.read(process.stdout.fileno(), 4096)
            if not data:
                return why
            *lines, said = (said + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode(errors="replace").partition(" ")
                if word == "up":
                    deadline = None
                    port = int(rest)
                    self._config = self._config.model_copy(update={"port": port})
                    self._set(port, "")
                elif word == "failed":
                    why = rest
        return ""

    def _wait_readable(self, fd: int | None, timeout: float | None) -> bool:
        fds = [self._wake_read] if fd is None else [fd, self._wake_read]
        ready, _, _ = select.select(fds, [], [], timeout)
        return fd in ready

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=10.0 if self._closing else 1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5.0)
        process.stdout.close()
        self.pid = None
