"""Real trainer ranks: plain processes over gloo, each runs one function of a script and reports as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("rank_main.py")
ROOT = SCRIPT.parents[3]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Rank:
    process: subprocess.Popen[str]
    log: Path

    def say(self, line: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> Any:
        """The next thing that the rank reports."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(
                f"the rank ended with {self.process.wait(timeout=10)}:\n{self.log.read_text()}"
            )
        return json.loads(line)


class Ranks:
    """`world` processes of `rank_main.py`; `with` ends them all, whatever happens."""

    def __init__(self, world: int, tmp: Path, env: dict[str, str] | None = None) -> None:
        self.world, self.tmp = world, tmp
        self.env = env or {}
        self.ranks: list[Rank] = []

    def __enter__(self) -> Ranks:
        port = free_port()
        self.tmp.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world):
            log = self.tmp / f"rank-{rank}.log"
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "WEIGHTSYNC_POD_IP": "127.0.0.1",
                "TMPDIR": str(self.tmp),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
                **self.env,
            }
            with log.open("w") as out:
                process = subprocess.Popen(
                    [sys.executable, str(SCRIPT)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=out,
                    env=env,
                    text=True,
                )
            self.ranks.append(Rank(process, log))
        try:
            assert self.read() == ["up"] * self.world
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait(timeout=10)
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def read(self) -> list[Any]:
        """The next report of every rank, in order of rank."""
        return [rank.read() for rank in self.ranks]

    def say(self, line: str = "go") -> None:
        for rank in self.ranks:
            rank.say(line)

    def run(self, case: str) -> list[Any]:
        """Run a case on all ranks; the first report of each."""
        self.say(case)
        return self.read()

    def end(self) -> list[int]:
        """Let the ranks leave as a training script does; exit codes."""
        for rank in self.ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        return self.join()

    def join(self, timeout: float = 60) -> list[int]:
        """Exit codes."""
        return [rank.process.wait(timeout=timeout) for rank in self.ranks]


@contextlib.contextmanager
def contract_trainer(
    folder: Path, urls: Sequence[str], workers: Sequence[int], model: Path, device: str = "cpu", **init: Any
) -> Iterator[tuple[Ranks, list[Any]]]:
    """Two ranks that have met servers of so many workers through vLLM's trainer contract, and what each said of it."""
    given = {
        "urls": list(urls), "workers": list(workers), "model": str(model), "device": device,
        "init": {"world_size": 2 + sum(workers), "deadline_seconds": 90, **init},
    }  # fmt: skip
    with Ranks(2, folder) as ranks:
        ranks.say("contract")
        yield ranks, ranks.run(json.dumps(given))
