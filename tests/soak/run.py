"""`make soak`: hundreds of rounds on real parts with faults drawn from a seed.

Checks that every answer of an admitted server is of one committed version and not of an old one, that every
version is committed in the end, and that nothing leaks. The same seed draws the same faults; when exactly they
fall is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.asking import Asker, Book, checkpoint_of, number_of
from tests.soak.faults import Injector, draw
from tests.soak.leaks import Look, compare, look
from tests.soak.world import SoakError, World, tail

ROUND_SECONDS = 180.0
"""Within which every version must be committed, whatever happens to it."""
REST_SECONDS = 120.0
WARM_UP = 0.1
"""The share of the rounds after which the first look at what is held is taken."""


@dataclass
class Figures:
    seed: int
    rounds: int = 0
    calm: list[float] = field(default_factory=list)
    """Seconds from publish to finished commit, of rounds without a fault."""
    troubled: list[float] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    rounds = int(os.environ.get("WEIGHTSYNC_SOAK_ROUNDS", "300"))
    seed = os.environ.get("WEIGHTSYNC_SOAK_SEED")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="default: WEIGHTSYNC_SOAK_ROUNDS, else 300"
    )
    parser.add_argument("--seed", type=int, default=int(seed) if seed else secrets.randbelow(1 << 31))
    parser.add_argument("--servers", type=int, default=2, help="vLLM servers; default: 2")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--keep", type=Path, help="folder for all logs; default: removed unless it fails")
    options = parser.parse_args()
    # SIGTERM leaves as Ctrl-C does, by every `finally` on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="weightsync-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"soak: seed {options.seed}, {options.rounds} rounds, logs in {folder}", flush=True)
    try:
        soak(folder, options.rounds, options.seed, options.servers, options.seconds)
    except (SoakError, AssertionError) as e:
        print(f"soak: FAILED with seed {options.seed}: {e}\nlogs: {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"soak: interrupted; seed {options.seed}, logs: {folder}", file=sys.stderr)
        return 130
    if options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def soak(folder: Path, rounds: int, seed: int, servers: int, seconds: float = float("inf")) -> Figures:
    """Raises SoakError for what must never happen."""
    seeded, figures = random.Random(seed), Figures(seed)
    began = time.monotonic()
    with World(folder, servers, f"{os.getpid()}-{seed}") as world:
        print(f"soak: everything is up after {time.monotonic() - began:.0f} s", flush=True)
        book, finished = Book(world.checkpoints), list[int]()
        injector = Injector(world)
        askers = [Asker(s, f"vllm-{i}", book, finished) for i, s in enumerate(world.servers)]
        for asker in askers:
            asker.start()
        early: Look | None = None
        started = time.monotonic()
        try:
            for number in range(1, rounds + 1):
                if time.monotonic() - started > seconds:
                    break
                faults = draw(seeded)
                injector.start(faults)
                try:
                    took, ms = one_round(world, number, finished)
                except BaseException:
                    print(
                        f"soak: round {number} with {[f.kind for f in faults]}", file=sys.stderr, flush=True
                    )
                    raise
                injector.join()
                figures.rounds = number
                figures.publish_ms.append(ms)
                (figures.troubled if faults else figures.calm).append(took)
                told = f" with {', '.join(f.kind for f in faults)}" if faults else ""
                print(
                    f"soak: {time.monotonic() - started:6.0f} s, step-{number} after {took:.2f} s{told}",
                    flush=True,
                )
                wrong = [line for asker in askers for line in asker.wrong]
                if wrong:
                    raise SoakError("\n".join(wrong[:10]))
                if early is None and number >= max(3, WARM_UP * rounds) and not injector.restarting:
                    early = at_rest(world, injector)
            injector.settle(600)
            last = figures.rounds
            end = time.monotonic() + REST_SECONDS
            while any(asker.last < last for asker in askers):
                if time.monotonic() > end:
                    raise SoakError(f"servers answer with {[a.last for a in askers]} after step-{last}")
                time.sleep(0.1)
            if set(world.gates().values()) != {"True"}:
                raise SoakError(f"all is committed, and the gates are {world.gates()}")
            late = at_rest(world, injector)
        except BaseException as e:
            print(diagnosis(world), file=sys.stderr)
            if isinstance(e, SoakError | AssertionError | KeyboardInterrupt):
                raise
            raise SoakError(f"{type(e).__name__}: {e}") from e
        finally:
            for asker in askers:
                asker.stop()
            with contextlib.suppress(Exception):
                injector.join()
        figures.seconds = time.monotonic() - started
        wrong = [line for asker in askers for line in asker.wrong]
        log = world.operator.logged()
        shm = late.shm
    grown, told = compare(early or late, late)
    report(figures, injector, askers, log, told)
    memory = [f"{found.pss / 1e6:.0f} MB" for found in (early or late, late)]
    print(f"memory of all processes together (PSS): {memory[0]} early, {memory[1]} late")
    print(f"the operator ended by itself {world.operator_ends} times, and was started again")
    left = {path: who for path, who in shm.items() if Path(path).exists()}
    print(
        f"/dev/shm: {len(shm)} files in use at the end, {len(left)} left behind, of {set().union(*left.values())}"
    )
    for path, who in left.items():
        # Queues of vLLM's own, whose servers are ended by SIGKILL here. Nothing of ours has a name there.
        Path(path).unlink(missing_ok=True)
        if not any(name.startswith("VLLM::") for name in who):
            grown.append(f"{path}, left behind by {sorted(who)}")
    deadline = time.monotonic() + 30
    while alive := list(world.processes()):
        if time.monotonic() > deadline:
            grown.append(f"processes that outlive the run: {alive}")
            break
        time.sleep(0.2)
    if wrong or grown:
        raise SoakError("\n".join([*wrong[:10], *grown]))
    print("soak: no wrong answer, no stale one, no version lost, nothing leaked")
    return figures


def one_round(world: World, number: int, finished: list[int]) -> tuple[float, float]:
    """Publish, and wait for the finished commit: seconds of both, milliseconds of the publish call."""
    began = time.monotonic()
    version = f"step-{number}"
    ms = world.trainer.publish(version, checkpoint_of(number))
    while True:
        world.keep_operator()
        status = world.status() or {}
        decision = status.get("decision") or {}
        if decision.get("version") == version and decision.get("finished"):
            finished.append(number)
            return time.monotonic() - began, ms
        if time.monotonic() - began > ROUND_SECONDS:
            raise SoakError(f"{version} was not committed within {ROUND_SECONDS:g} s")
        if decision and number_of(decision["version"]) > number:
            raise SoakError(f"{decision['version']} was decided before it was published")
        time.sleep(0.05)


def at_rest(world: World, injector: Injector) -> Look:
    """What is held when every mover has its spare again."""
    injector.settle(600)
    want = world.trainer.RANKS + len(world.servers)
    deadline = time.monotonic() + REST_SECONDS
    while True:
        found = look(world)
        if (found.kinds["ws-mover"], found.kinds["ws-spare"]) == (want, want):
            return found
        if time.monotonic() > deadline:
            raise SoakError(f"{want} movers and as many spares do not come to rest: {dict(found.kinds)}")
        time.sleep(0.5)


def report(figures: Figures, injector: Injector, askers: list[Asker], log: str, told: list[str]) -> None:
    def times(title: str, values: list[float], unit: str) -> str:
        if not values:
            return f"{title}: none"
        ordered = sorted(values)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return (
            f"{title}: {len(values)}, median {statistics.median(values):.2f} {unit}, p99 {p99:.2f} {unit}, "
            f"longest {ordered[-1]:.2f} {unit}"
        )

    failed = {
        what: log.count(f"soak/policy: {what}: ") for what in ("RoundFailed", "EpochFailed", "CommitLate")
    }
    print(f"\nseed {figures.seed}: {figures.rounds} versions committed in {figures.seconds:.0f} s")
    print(", ".join(f"{what}: {count}" for what, count in failed.items()))
    print(times("rounds without a fault", figures.calm, "s"))
    print(times("rounds with faults", figures.troubled, "s"))
    print(times("publish(), with the wait for a version still travelling", figures.publish_ms, "ms"))
    for kind, count in sorted(injector.happened.items()):
        print(f"  {count:4} x {kind}")
    if injector.missed:
        print(f"  {injector.missed:4} x no target at that moment")
    for asker in askers:
        print(
            f"{asker.name}: {asker.answers} answers, {asker.straddled} across a flip, {asker.refused} refused (503), "
            f"{asker.unreachable} unreachable, {len(asker.wrong)} wrong"
        )
    print("what lived through the whole run:")
    for line in told:
        print(f"  {line}")


def diagnosis(world: World) -> str:
    parts = [f"status: {world.status()}", f"movers: {world.movers()}"]
    for log in (world.operator.log, *world.trainer.logs, *(s.log for s in world.servers)):
        with contextlib.suppress(OSError):
            parts.append(f"--- {log}\n{tail(log)}")
    return "\n".join(parts)
