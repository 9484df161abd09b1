"""A Docker engine of our own, for machines that have the program but no running engine or no registry.

It runs in namespaces and control groups of its own; its socket is a file in the cache folder. Containers have
no way out to the internet, and nothing is left of it after `stop` but its image store in the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.cluster import cache
from tests.cluster.apiserver import run_tool
from tests.cluster.errors import ClusterError
from tests.cluster.nodeimage import NODE_FILES, NodeImage

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 15.0
LOAD_DEADLINE_S = 300.0
CAP_SYS_RESOURCE = 24
_MODULES = Path("/lib/modules")
_CGROUPS = Path("/sys/fs/cgroup")


class Dockerd:
    """The one engine of this cache folder. Its methods are for holders of `cache.lock("dockerd")`."""

    def __init__(self) -> None:
        self.folder = cache.folder("dockerd")
        self.socket = self.folder / "docker.sock"
        self.host = f"unix://{self.socket}"
        self._state = self.folder / "state.json"

    def process(self) -> int | None:
        """The process in whose network the engine runs, None when it does not run."""
        state = self._read()
        return state["init"] if state and alive(state["init"], state["init_start"]) else None

    def start(self) -> None:
        """Start it, unless it runs already."""
        if self.process() is not None and self.answers():
            return
        self.stop()
        if os.geteuid() != 0:
            raise ClusterError(
                "no Docker engine answers that can pull images, and starting one here needs root: "
                "start Docker (with a way to its registry), or run this as root"
            )
        log = cache.log_path("dockerd")
        state: dict[str, Any] = {"cgroups": [], "made_modules": not _MODULES.exists()}
        # kind mounts /lib/modules into its nodes, and the engine would make the folder and leave it.
        _MODULES.mkdir(exist_ok=True)
        self._write(state)
        try:
            state["cgroups"] = [str(group) for group in _make_cgroups(f"weightsync-{os.getpid()}")]
            self._write(state)
            enter = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'
            with log.open("w") as out:
                outer = subprocess.Popen(
                    [
                        "sh",
                        "-ec",
                        enter,
                        "sh",
                        *state["cgroups"],
                        "--",
                        "unshare",
                        "--mount",
                        "--cgroup",
                        "--net",
                        "--uts",
                        "--ipc",
                        "--pid",
                        "--fork",
                        "--kill-child",
                        "--mount-proc",
                        "bash",
                        NODE_FILES / "dockerd.sh",
                        self.folder,
                        *self._runtime(),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    env={
                        **os.environ,
                        "PATH": "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin",
                    },
                )
            state |= {"outer": outer.pid, "outer_start": start_time(outer.pid)}
            self._write(state)
            end = time.monotonic() + START_DEADLINE_S
            while not self.answers():
                if outer.poll() is not None or time.monotonic() > end:
                    raise ClusterError(f"dockerd did not start\n{cache.tail(log)}")
                time.sleep(0.1)
            init = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
            self._write(state | {"init": init, "init_start": start_time(init)})
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it with all of its containers, and undo what it left outside; may be called at any time."""
        state = self._read()
        if state is None:
            return
        if self.process() is not None:
            os.kill(state["init"], signal.SIGTERM)
            wait_gone(state["init"], state["init_start"], STOP_DEADLINE_S)
        else:
            # It was killed: what its containers left in the store would come back with it.
            cache.remove(self.folder / "data")
        if "outer" in state and alive(state["outer"], state["outer_start"]):
            os.kill(state["outer"], signal.SIGKILL)
            wait_gone(state["outer"], state["outer_start"], STOP_DEADLINE_S)
        _remove_cgroups([Path(group) for group in state["cgroups"]])
        if state["made_modules"]:
            with contextlib.suppress(OSError):
                _MODULES.rmdir()
        self.socket.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)

    def answers(self) -> bool:
        """Whether the engine answers at its socket."""
        if not self.socket.exists():
            return False
        try:
            self.docker("version", timeout=5)
        except ClusterError:
            return False
        return True

    def docker(self, *args: str, timeout: float = 60) -> str:
        """Run the docker command against this engine and return what it prints."""
        return run_tool([str(docker_program()), "--host", self.host, *args], timeout=timeout)

    def load(self, image: NodeImage) -> None:
        """Make the node image known to the engine, in place of those of earlier builds."""
        wanted = image.ref.rpartition(":")
        for line in self.docker("image", "ls", wanted[0], "--format", "{{.Tag}}").split():
            if line == wanted[2]:
                return
            with contextlib.suppress(ClusterError):  # in use by a running cluster
                self.docker("image", "rm", f"{wanted[0]}:{line}")
        self.docker("load", "--quiet", "--input", str(image.archive), timeout=LOAD_DEADLINE_S)

    def _runtime(self) -> list[str]:
        bounding = next(
            line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd")
        )
        if int(bounding.split()[1], 16) >> CAP_SYS_RESOURCE & 1:
            return []
        runc = shutil.which("runc", path="/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin")
        if runc is None:
            raise ClusterError("no runc beside dockerd: apt-get install -y --no-install-recommends docker.io")
        wrapper = self.folder / "runc"
        wrapper.write_text((NODE_FILES / "runc.sh").read_text().replace("@RUNC@", runc))
        wrapper.chmod(0o755)
        return ["--add-runtime", f"narrow={wrapper}", "--default-runtime", "narrow"]

    def _read(self) -> dict[str, Any] | None:
        try:
            state: dict[str, Any] = json.loads(self._state.read_text())
        except (OSError, ValueError):
            return None
        return {"init": 0, "init_start": "", "cgroups": [], "made_modules": False, **state}

    def _write(self, state: dict[str, Any]) -> None:
        draft = self._state.with_suffix(".draft")
        draft.write_text(json.dumps(state))
        draft.replace(self._state)


def docker_program() -> Path:
    """The docker command that belongs to dockerd: a newer one in PATH may refuse an older engine."""
    beside = Path("/usr/bin/docker")
    found = str(beside) if beside.exists() else shutil.which("docker")
    if found is None:
        raise ClusterError("`docker` is not in PATH: apt-get install -y --no-install-recommends docker.io")
    return Path(found)


def start_time(pid: int) -> str:
    """When a process was started, in clock ticks: with its id its name for good. "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def alive(pid: int, started: str) -> bool:
    """Whether the process that had this id then is there still, and is no zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"


def wait_gone(pid: int, started: str, deadline_s: float) -> bool:
    """Wait until a process is gone, reaping a child; False when it is there after `deadline_s`."""
    end = time.monotonic() + deadline_s
    while alive(pid, started):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def _make_cgroups(name: str) -> list[Path]:
    """A group of our own in every hierarchy, below this process' own (v2 alone: below the root)."""
    groups = []
    if (_CGROUPS / "cgroup.controllers").exists():
        group = _CGROUPS / name
        for controller in (_CGROUPS / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):
                (_CGROUPS / "cgroup.subtree_control").write_text(f"+{controller}")
        try:
            group.mkdir()
        except OSError as error:
            raise ClusterError(
                f"{group}: {error.strerror}; a Docker engine needs a writable cgroup tree"
            ) from None
        return [group]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        hierarchy = _CGROUPS / (controllers.removeprefix("name=") or "unified")
        if not hierarchy.is_dir():
            continue
        group = hierarchy / path.strip("/") / name
        group.mkdir()
        groups.append(group)
        if controllers == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((group.parent / file).read_text())
    if not groups:
        raise ClusterError("no cgroup hierarchies at /sys/fs/cgroup: a Docker engine needs them")
    return groups


def _remove_cgroups(groups: list[Path]) -> None:
    """Remove groups with all below them; processes that are just ending hold them for a moment."""
    end = time.monotonic() + 3
    while any(group.exists() for group in groups) and time.monotonic() < end:
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        time.sleep(0.1)
