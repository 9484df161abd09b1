"""The folder that keeps what was built: outside the clone, safe for two runs at once, and always rebuildable.

`$WEIGHTSYNC_CACHE`, else `$XDG_CACHE_HOME/weightsync`, else `~/.cache/weightsync`.
Every entry is complete or absent: it is built beside its place and renamed, so a killed build is redone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

KEPT = 3  # builds of one thing from different inputs: each may be a gigabyte
LOCK_DEADLINE_S = 2400.0  # a cold build of everything on two cores fits in


def folder(*parts: str) -> Path:
    """The cache folder, or a folder in it, made when missing."""
    root = os.environ.get("WEIGHTSYNC_CACHE") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightsync"
    )
    path = Path(root).absolute().joinpath(*parts)
    path.mkdir(parents=True, exist_ok=True)
    return path


def log_path(name: str) -> Path:
    """Where the log called `name` is kept."""
    return folder("logs") / f"{name}.log"


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log with its path, ready to be put into an error message."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except OSError:
        return f"(no log at {path})"
    return "\n".join([f"last lines of {path}:", *(f"  {line}" for line in text)])


def digest(value: object) -> str:
    """A short hash of a JSON-able description of a build's inputs."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@contextlib.contextmanager
def lock(name: str, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
    """Hold the machine-wide lock `name`; it is released when this process ends, however it ends.

    Raises ClusterError when another process still holds it after `deadline_s` seconds.
    """
    path = folder("locks") / f"{name}.lock"
    end = time.monotonic() + deadline_s
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    file.seek(0)
                    holder = file.read().strip() or "another process"
                    raise ClusterError(
                        f"{path} was held for {deadline_s:.0f} s by {holder}; "
                        "wait for it, or end it, and try again"
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def entry(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The cached file or folder `kind/key`; when it is missing, `build(path)` makes it at that path.

    A key ends in `-<hash of the inputs>`; of entries that differ in this only, the last few used are kept.
    """
    path = folder(kind) / key
    if path.exists():
        os.utime(path)
        return path
    with lock(f"{kind}-{key}"):
        if path.exists():
            return path
        draft = path.with_name(f".{path.name}.draft")
        remove(draft)
        build(draft)
        os.replace(draft, path)
        os.utime(path)
        family = key.rpartition("-")[0]
        if family:
            siblings = sorted(path.parent.glob(f"{family}-*"), key=lambda other: other.stat().st_mtime)
            for old in siblings[:-KEPT]:
                remove(old)
    return path


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    log: Path,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> None:
    """Run a build step with its output appended to `log`.

    Raises ClusterError, with the tail of the log, when it fails or takes more than `timeout` seconds.
    """
    with log.open("a") as out:
        out.write(f"$ {' '.join(map(str, argv))}\n")
        out.flush()
        child = subprocess.Popen(
            [str(part) for part in argv],
            cwd=cwd,
            env=None if env is None else {**os.environ, **env},
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            child.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{what}: not done after {timeout:.0f} s\n{tail(log)}") from None
        finally:
            if child.poll() is None:
                # its own session, so that compilers it started end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, 9)
                child.wait()
    if child.returncode:
        raise ClusterError(f"{what}: exit status {child.returncode}\n{tail(log)}")
