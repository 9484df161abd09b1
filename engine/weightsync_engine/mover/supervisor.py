"""The parent's side of a mover: starts it, replaces it when it dies, and lets it go at the end.

One daemon thread does all the work and all the waiting. The parent's own calls (`published`, `close`) only
leave a note for it, so they cannot block a training step or a decode step, whatever state the mover is in.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import selectors
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..layout.codec import encode_trainer, encode_worker
from ..layout.tensors import TrainerManifest, WorkerManifest
from ..protocol.messages import Problem
from ..protocol.mover import MoverOutcome
from .cuda import visible_to_child
from .slab import Slab

log = logging.getLogger(__name__)

UP_SECONDS = 120.0
"""A mover that does not answer this long after its start (imports included) is replaced."""
_BACKOFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_SECONDS = 10.0
"""A mover that lived this long ends a row of quick deaths."""
_SPARE_AFTER = 5.0
"""Seconds from a mover's death to the start of the next spare: the epoch and the round that mend what the death broke
come first, which its imports would take a core from."""
_NAMES = "timeout:1 attempts:1"
"""TCPStore asks DNS for the name of every peer, for its log, and waits for the answer: on both sides, up to 10 s where
none comes (DNS down, or its traffic not allowed). What is met here are addresses; a name is asked for again."""
_SOCKET_PATH_MAX = 107
_SCRUB = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT",
})  # fmt: skip
_SCRUB_PREFIXES = (
    "MASTER_",
    "TORCHELASTIC_",
    "TORCH_NCCL_ASYNC",
    "OMP_",
    "KMP_",
    "MKL_NUM",
    "GLOO_",
    "PMI",
    "OMPI_",
)


def mover_environment(base: Mapping[str, str], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The parent's environment without what binds it to the parent's own process group, threads or
    preloads."""
    env = {k: v for k, v in base.items() if k not in _SCRUB and not k.startswith(_SCRUB_PREFIXES)}
    env["OMP_NUM_THREADS"] = "1"
    env.setdefault("RES_OPTIONS", _NAMES)
    env.update(extra or {})
    return env


def nccl_library(preloads: str) -> str:
    """The libnccl that a mover is to load before torch loads the one that it was built with; empty: torch's.

    What this process preloads counts first, then the newest thing that can be imported: the wheel of NCCL.
    """
    for path in re.split("[ :]+", preloads):
        if os.path.basename(path).startswith("libnccl.so"):
            return path
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        return ""
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return ""


class _Child:
    """One mover process as the supervisor sees it. `stdin` is written without blocking, `stdout` read so."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process = process
        self.stdin, self.stdout = process.stdin, process.stdout
        for pipe in (self.stdin, self.stdout):
            os.set_blocking(pipe.fileno(), False)
        self.started = time.monotonic()
        self.outgoing = bytearray()
        self.incoming = bytearray()
        self.ready = False
        """Imports are done, the slab is mapped; on a GPU its context stands."""
        self.up = False
        self.why = ""
        """What it said of its own end."""

    def flush(self) -> None:
        """Write what the pipe takes now. A pipe without a reader is found by the end of stdout instead."""
        try:
            while self.outgoing:
                del self.outgoing[: os.write(self.stdin.fileno(), self.outgoing[:65536])]
        except BlockingIOError:
            pass
        except OSError:
            self.outgoing.clear()

    def close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class MoverSupervisor:
    """Keeps one mover running beside this process until `close`, with a spare that has done its imports.

    `slab` stays the caller's and must live until `close`. `staging_bytes`: device memory that the mover sets
    aside for its transport, if the slab is on a GPU. `on_outcome` is called in the supervisor's thread.
    Raises ValueError or OSError at once for what cannot work (no interpreter, socket path too long, bad
    folder).
    """

    def __init__(
        self,
        role: Literal["trainer", "inference"],
        local_rank: int,
        slab: Slab,
        manifest: TrainerManifest | WorkerManifest,
        run_dir: Path,
        on_outcome: Callable[[MoverOutcome], None] | None = None,
        spare: bool = True,
        env: Mapping[str, str] | None = None,
        staging_bytes: int = 0,
    ) -> None:
        if (role == "trainer") != isinstance(manifest, TrainerManifest):
            raise ValueError(f"role {role!r} with a {type(manifest).__name__}")
        if not sys.executable:
            raise ValueError("sys.executable is empty: weightsync cannot tell which Python runs its mover")
        self.socket_path = private_folder(run_dir) / f"mover-{local_rank}.sock"
        if len(os.fsencode(self.socket_path)) > _SOCKET_PATH_MAX:
            raise ValueError(
                f"socket path {self.socket_path} exceeds {_SOCKET_PATH_MAX} bytes: use a shorter folder"
            )
        self.problem: Problem | None = None
        """Why the last mover died or could not start; None if none ever did. `pid` tells whether one is up
        now."""
        encoded = (
            encode_trainer(manifest) if isinstance(manifest, TrainerManifest) else encode_worker(manifest)
        )
        head = json.dumps({
            "role": role, "local_rank": local_rank, "socket": str(self.socket_path),
            "staging_bytes": staging_bytes,
        })  # fmt: skip
        self._config = head[:-1].encode() + b', "manifest": ' + encoded + b"}\n"
        self._slab = slab
        self._on_outcome = on_outcome
        self._want_spare = spare
        self._env = mover_environment(os.environ, env)
        if slab.gpu is not None:
            self._env |= visible_to_child(slab.gpu.uuid, self._env)
            if (library := nccl_library(os.environ.get("LD_PRELOAD", ""))) and "LD_PRELOAD" not in (
                env or {}
            ):
                self._env["LD_PRELOAD"] = library
        self._active: _Child | None = None
        self._spare: _Child | None = None
        self._quick_deaths = 0
        self._spare_deaths = 0
        self._start_at = 0.0
        self._spare_at = 0.0
        self._published = False
        self._closing = False
        self._pid = os.getpid()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"weightsync-mover-{local_rank}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the mover that is up now."""
        active = self._active
        return active.process.pid if active is not None and active.up else None

    def wait_ready(self, seconds: float) -> str:
        """Wait until the mover is up and the spare stands, all their memory taken. Returns why not, or nothing."""
        deadline = time.monotonic() + seconds
        while True:
            active, spare = self._active, self._spare
            if active is not None and active.up and (not self._want_spare or (spare and spare.ready)):
                return ""
            if self.problem is not None:
                return self.problem.message
            if time.monotonic() > deadline:
                late = "spare mover" if active is not None and active.up else "mover"
                return f"the {late} was not up within {seconds:g} s"
            time.sleep(0.01)

    def published(self) -> None:
        """Tell the mover that the slab has a new stamp. Never blocks; a mover that starts later sees it
        anyway."""
        self._published = True
        self._wake()

    def close(self) -> None:
        """Let the movers go: closes their pipes and nothing else. They leave by themselves about 2 s later.

        Neither kills nor reaps: vLLM's own shutdown walks the tree of children and can hang on one that
        vanishes.
        """
        if self._closing:
            return
        self._closing = True
        if os.getpid() != self._pid:
            return  # a fork of the parent: the movers are not ours
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_write >= 0:
                with contextlib.suppress(BlockingIOError):  # full: the thread wakes anyway
                    os.write(self._wake_write, b"x")

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._once()
                except Exception as e:
                    self.problem = Problem(
                        reason="MoverSupervisor", message=f"{type(e).__name__}: {e}"[:1024]
                    )
                    log.exception("the mover's supervisor failed; trying again")
                    time.sleep(1.0)
        finally:
            for child in (self._active, self._spare):
                if child is not None:
                    child.close_pipes()
                    # Keeps Popen from reaping or complaining when it is collected; the kernel does the rest.
                    child.process.returncode = 0
            with self._wake_lock:  # nobody may write to a number that the next open() gives to another file
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def _once(self) -> None:
        now = time.monotonic()
        if self._active is None and now >= self._start_at:
            self._active = self._spare or self._exec()
            self._spare = None
            self._active.started = now
            self._active.outgoing += self._config
            self._published = True
        if (
            self._want_spare
            and self._spare is None
            and self._active is not None
            and self._active.up
            and now >= self._spare_at
        ):
            self._spare = self._exec()
        if self._published and self._active is not None:
            self._published = False
            if not self._active.outgoing.endswith(b"published\n"):
                self._active.outgoing += b"published\n"
        timeout = 60.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for child in (self._active, self._spare):
                if child is None:
                    continue
                child.flush()
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if child.outgoing:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            if self._active is None:
                timeout = max(self._start_at - now, 0.0)
            elif not self._active.up:
                timeout = max(self._active.started + UP_SECONDS - now, 0.0)
            elif self._want_spare and self._spare is None:
                timeout = max(self._spare_at - now, 0.0)
            events = selector.select(timeout)
        for key, mask in events:
            if key.fileobj == self._wake_read:
                os.read(self._wake_read, 4096)
            elif mask & selectors.EVENT_READ and isinstance(key.data, _Child):
                self._read(key.data)
        active = self._active
        if active is not None and not active.up and time.monotonic() - active.started >= UP_SECONDS:
            active.process.kill()  # ours alone, before it ever took part in anything
            self._ended(active, f"did not come up within {UP_SECONDS:g} s")

    def _command(self) -> list[str]:
        # -P: the working folder of a training script must not shadow modules of the mover.
        return [sys.executable, "-P", "-m", "weightsync_engine.mover", str(self._slab.fd)]

    def _exec(self) -> _Child:
        process = subprocess.Popen(
            self._command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            pass_fds=(self._slab.fd,),
            start_new_session=True,
            bufsize=0,
        )
        return _Child(process)

    def _read(self, child: _Child) -> None:
        try:
            data = os.read(child.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._ended(child, "")
            return
        child.incoming += data
        *lines, rest = bytes(child.incoming).split(b"\n")
        child.incoming = bytearray(rest)
        for line in lines:
            self._line(child, line)

    def _line(self, child: _Child, line: bytes) -> None:
        if line == b"up":
            child.up = True
            return
        if line == b"ready":
            child.ready = True
            return
        if line.startswith(b"problem "):
            with contextlib.suppress(ValueError):
                child.why = str(json.loads(line.removeprefix(b"problem ")))
            return
        try:
            outcome = MoverOutcome.model_validate_json(line)
        except ValidationError:
            log.warning("the mover wrote an unknown line: %r", line[:200])
            return
        if self._on_outcome is not None:
            try:
                self._on_outcome(outcome)
            except Exception:
                log.exception("on_outcome failed for version %s", outcome.version)

    def _ended(self, child: _Child, why: str) -> None:
        """A mover is gone: reap it, note why, and let the next turn start another one after a pause."""
        try:
            code = child.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            child.process.kill()
            code = None
        child.close_pipes()
        if not why:
            why = (
                f"was ended by signal {-code}"
                if code is not None and code < 0
                else f"exited with code {code}"
            )
            if child.why:
                why = f"{why} ({child.why})"
        now = time.monotonic()
        lived = now - child.started
        if child is self._spare:
            name, self._spare = "spare mover", None
            self._spare_deaths = 1 if lived >= _STEADY_SECONDS else self._spare_deaths + 1
            self._spare_at = now + _pause(self._spare_deaths)
        else:
            name, self._active = "mover", None
            self._quick_deaths = 1 if lived >= _STEADY_SECONDS else self._quick_deaths + 1
            self._start_at = now + _pause(self._quick_deaths)
            self._spare_at = max(self._spare_at, now + _SPARE_AFTER)
        message = (
            f"{name} {child.process.pid} {why} after {lived:.1f} s; this process's log has its last words"
        )
        self.problem = Problem(reason="MoverDied", message=message)
        log.warning("%s", message)


def _pause(deaths: int) -> float:
    """Seconds to wait after so many quick deaths in a row. None after the first: a driver that kills waits
    for it."""
    return _BACKOFF[min(deaths, len(_BACKOFF)) - 1]


def private_folder(path: Path) -> Path:
    """Make the folder (0700) or check that it is ours alone. Raises OSError that says what to do."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user {info.st_uid}: movers need a folder of their own user")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise PermissionError(f"{path} is open to others (mode {stat.S_IMODE(info.st_mode):o}): make it 0700")
    return path.absolute()
