"""What a run holds: processes, descriptors, memory. Two looks at rest, early and late, must be alike."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.world import World, comm

PSS_MARGIN = 0.10
PSS_MARGIN_BYTES = 64 << 20
RSS_MARGIN = 0.15
RSS_MARGIN_BYTES = 48 << 20
FD_MARGIN = 8
THREAD_MARGIN = 8


@dataclass(frozen=True)
class Process:
    pid: int
    comm: str
    started: int
    """Ticks after boot: with the pid it tells one process from another."""
    descriptors: int
    threads: int
    rss: int
    pss: int


@dataclass
class Look:
    processes: list[Process] = field(default_factory=list)
    shm: dict[str, set[str]] = field(default_factory=dict)
    """Files of /dev/shm that these processes have mapped, and the processes' names."""

    @property
    def kinds(self) -> Counter[str]:
        """How many processes of each name; movers of all ranks are one kind."""
        return Counter("ws-mover" if p.comm.startswith("ws-mover") else p.comm for p in self.processes)

    @property
    def pss(self) -> int:
        return sum(p.pss for p in self.processes)


def look(world: World) -> Look:
    found = Look()
    for pid in world.processes():
        proc = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            status = dict(
                line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
            )
            if status["State"].split()[0] == "Z":
                continue
            rollup = (proc / "smaps_rollup").read_text().splitlines()
            pss = next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
            maps = (proc / "maps").read_text()
            for line in maps.splitlines():
                if "/dev/shm/" in line:
                    found.shm.setdefault(line.split(maxsplit=5)[5], set()).add(_name(pid))
            found.processes.append(
                Process(
                    pid=pid,
                    comm=_name(pid),
                    started=int((proc / "stat").read_text().rpartition(")")[2].split()[19]),
                    descriptors=len(os.listdir(proc / "fd")),
                    threads=int(status["Threads"]),
                    rss=int(status["VmRSS"].split()[0]) << 10,
                    pss=pss,
                )
            )
    return found


def _name(pid: int) -> str:
    """What it calls itself; of Python what it runs."""
    name = comm(pid).decode(errors="replace")
    if not name.startswith("python"):
        return name
    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[1:]
    for flag, word in itertools.pairwise(words):
        if flag == "-m":
            return word
    return next((Path(word).name for word in words if word.endswith(".py")), " ".join(words[:3])[:60])


def compare(early: Look, late: Look) -> tuple[list[str], list[str]]:
    """(what has grown beyond its margin, figures of every process that lived through both looks)."""
    grown, told = [], []
    for kind in sorted(early.kinds.keys() | late.kinds.keys()):
        if late.kinds[kind] > early.kinds[kind]:
            grown.append(f"{late.kinds[kind]} processes called {kind}, there were {early.kinds[kind]}")
    before = {(p.pid, p.started): p for p in early.processes}
    for now in sorted(late.processes, key=lambda p: p.pid):
        then = before.get((now.pid, now.started))
        if then is None:
            continue
        told.append(
            f"{now.comm} ({now.pid}): descriptors {then.descriptors} -> {now.descriptors}, threads "
            f"{then.threads} -> {now.threads}, RSS {_mb(then.rss)} -> {_mb(now.rss)}"
        )
        if now.descriptors > then.descriptors + FD_MARGIN:
            grown.append(f"descriptors of {now.comm} ({now.pid}): {then.descriptors} -> {now.descriptors}")
        if now.threads > then.threads + THREAD_MARGIN:
            grown.append(f"threads of {now.comm} ({now.pid}): {then.threads} -> {now.threads}")
        if now.rss > then.rss * (1 + RSS_MARGIN) + RSS_MARGIN_BYTES:
            grown.append(f"RSS of {now.comm} ({now.pid}): {_mb(then.rss)} -> {_mb(now.rss)}")
    if late.pss > early.pss * (1 + PSS_MARGIN) + PSS_MARGIN_BYTES:
        grown.append(f"memory of all processes together (PSS): {_mb(early.pss)} -> {_mb(late.pss)}")
    return grown, told


def _mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
