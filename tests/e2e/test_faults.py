"""The fault matrix in a real cluster: every run of `matrix.runs()`, judged by what all sides saw of it.

`make e2e` runs the diagonal, `make e2e-faults` all. One fleet goes through all cells; after a cell that failed it is
mended, or made anew. Results are kept in `build/e2e/fault-matrix.json` and shown as a table at the end; with
WEIGHTSYNC_RESUME set, runs that passed according to it are left out.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from examples.demo.fleet import ROOT, FleetError, wait_until
from tests.cluster import ClusterError
from tests.e2e import judge
from tests.e2e.hit import Hit, heal, hold
from tests.e2e.matrix import (
    LEAD,
    OTHER,
    SECOND,
    SLACK,
    SMOKE,
    STALL_LIMIT,
    VICTIM,
    Result,
    Run,
    runs,
    slow,
)
from tests.e2e.results import Results
from tests.e2e.world import Pod, World, named

LOGS = ROOT / "build" / "e2e"
HEAL_SECONDS = 200.0
"""After the fault, or its end: a node, a server and a training run have started again, and everybody is in sync."""
MEND_SECONDS = 240.0
PATIENCE = float(os.environ.get("WEIGHTSYNC_PATIENCE", "1"))
"""By how much all bounds on times are wider: the machine that runs the cluster may be slow, or do other things too.
What was measured stands in the table in any case."""

pytestmark = pytest.mark.timeout(600)


def _marks(run: Run) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.faults]
    marks += [pytest.mark.smoke] if run.id in SMOKE else []
    return marks + ([pytest.mark.slow] if slow(run) else [])


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    results = Results(LOGS)
    yield results
    print("\n" + results.write())


@pytest.fixture(scope="module")
def one_round(world: World) -> float:
    """Seconds that an epoch and a round take when nothing goes wrong: the median of three."""
    took = []
    for transport in ("Gloo", "Auto", "Gloo"):
        patch = f'{{"spec": {{"transport": "{transport}"}}}}'
        world.fleet.kubectl("patch", "wsync", "demo", "--type=merge", "-p", patch)
        began = time.time()
        version = world.go()
        world.wait_all_serve(lambda version=version: version, 60)
        took.append(time.time() - began)
    world.wait_heard(version)
    return statistics.median(took)


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id, marks=_marks(run)) for run in runs()])
def test_cell(world: World, results: Results, one_round: float, run: Run) -> None:
    victim, other = world.server(VICTIM), world.server(OTHER)
    cell = Cell(world, run, one_round, victim, other)
    try:
        cell.carry_out()
    except (FleetError, ClusterError) as error:
        cell.trouble.append(str(error))
        keep(cell)
        mend(world, victim.node)
    else:
        if cell.trouble:
            keep(cell)
    results.add(cell.result())
    assert not cell.trouble, "\n".join(cell.trouble)


def keep(cell: Cell) -> None:
    """What a person needs of a cell that failed."""
    folder = LOGS / "cells" / cell.run.id
    cell.world.fleet.keep_logs(folder)
    seen = cell.world.history.since(cell.began)
    (folder / "history.json").write_text(json.dumps([asdict(s) for s in seen]))


def mend(world: World, node: str) -> None:
    """Bring the fleet back for the next cell, by a new one if need be."""
    try:
        heal(world, node, MEND_SECONDS)
    except (FleetError, ClusterError):
        world.fleet.stop()
        world.fleet.start()
        world.fleet.wait_servers_ready()
        heal(world, node, MEND_SECONDS)
    world.wait_heard(f"step-{world.count}", 60)


class Cell:
    """One run: what is done and what is seen."""

    def __init__(self, world: World, run: Run, one_round: float, victim: Pod, other: Pod) -> None:
        self.world, self.run, self.expected = world, run, run.expected
        self.one_round, self.victim, self.other = one_round, victim, other
        self.began = time.time()
        self.newest = ""
        self.found: dict[str, Any] = {}
        self.trouble: list[str] = []
        """What was not as it must be; the fleet is in sync for all that, unless an error was raised as well."""
        self.pods = {VICTIM: victim.name, OTHER: other.name, LEAD: LEAD, SECOND: SECOND}

    def result(self) -> Result:
        run = self.run
        base = Result(run.id, run.faults, run.target, run.phase, not self.trouble, run.expected.meanwhile)
        return replace(base, trouble="; ".join(self.trouble), **self.found)

    def must(self, holds: bool, else_said: str) -> None:
        if not holds:
            self.trouble.append(else_said)

    def carry_out(self) -> None:
        world, expected = self.world, self.expected
        world.wait_spares()
        world.aim()
        # A process that an earlier cell restarted may not be missed yet; what a version passed through is whole.
        settled = world.go()
        world.wait_all_serve(lambda: settled, 60)
        before = world.history.status
        hit = Hit(world, self.run.faults[0], self.run.target, self.victim, self.other)
        held = None
        undo: Callable[[], None] = lambda: None  # noqa: E731
        try:
            held = hold(world, self.run.phase, self.victim, self.other)
            self.newest = held.version
            self.found["load"] = os.getloadavg()[0]
            struck = time.time()
            undo = hit.strike()
            held.release(but=hit.kept)
            self.meanwhile(struck, before)
            ended = time.time() if expected.lasting else struck
            undo()
            held.release()
            if expected.new_run:
                self.next_of_new_run(struck)
            world.wait_all_serve(lambda: self.newest, HEAL_SECONDS)
            self.found["healed_s"] = round(time.time() - ended, 1)
        finally:
            undo()
            if held is not None:
                held.release()
        self.blame(before, struck)
        world.wait_heard(self.newest)
        self.check_answers()
        self.check_stall(struck)

    def meanwhile(self, struck: float, before: dict[str, Any]) -> None:
        """Before anything is undone, and within the deadline."""
        expected, world = self.expected, self.world
        allowed = PATIENCE * (expected.within + SLACK + self.one_round)
        self.found["allowed_s"] = round(allowed, 1)
        match expected.meanwhile:
            case "all":
                names = [self.victim.name, self.other.name]
            case "others":
                names = [self.other.name]
            case "none":
                names = []

        def check() -> tuple[bool | None, object]:
            if names:
                # A part that comes back before anybody misses it is not to be named.
                told = not (expected.lasting and expected.culprits) or bool(self.culprit(before, struck))
                good = world.serving(self.newest, *names) and told
                return good or None, {n: world.row(n) for n in names} | {"named": told}
            if not expected.culprits:
                return (True if time.time() - struck >= expected.within else None), ""
            return (True if self.culprit(before, struck) else None), world.history.status.get("conditions")

        # Longer than allowed, so that the table shows by how much it was late.
        wait_until(f"{expected.meanwhile} having {self.newest}", check, 2 * allowed + 10, every=0.1)
        took = time.time() - struck
        self.found["meanwhile_s"] = round(took, 1)
        self.must(
            took <= allowed, f"{expected.meanwhile} had it after {took:.1f} s, allowed are {allowed:.1f} s"
        )

    def next_of_new_run(self, struck: float) -> None:
        """The training starts again, and its successor publishes the next version."""

        def again() -> tuple[bool | None, object]:
            lines = self.world.trainer_lines(struck)
            return (True if any("loop" in x and x["loop"] > struck + 1 for x in lines) else None), lines[-2:]

        def restarted() -> tuple[bool | None, object]:
            lines = self.world.trainer_lines(struck)
            return (True if any("run" in x and x["t"] > struck for x in lines) else None), lines[-2:]

        wait_until("a new training run", restarted, HEAL_SECONDS)
        wait_until("the new training run's steps", again, HEAL_SECONDS)
        self.newest = self.world.go()

    def culprit(self, before: dict[str, Any], struck: float) -> str:
        words = named(self.world.history.since(struck), before)
        pods = [self.pods[who] for who in self.expected.culprits]
        return next((pod for pod in pods if pod in words), "")

    def blame(self, before: dict[str, Any], struck: float) -> None:
        if self.expected.culprits:
            self.found["named"] = self.culprit(before, struck)
            words = sorted(w for w in named(self.world.history.since(struck), before) if "-" in w)
            self.must(bool(self.found["named"]), f"none of {self.expected.culprits} is named, only {words}")

    def check_answers(self) -> None:
        world = self.world
        heard = world.heard(self.began)
        self.found["answers"] = len(heard)
        self.must(any(h.service for h in heard), "the Service answered nothing")
        wrong = judge.wrong(heard, world.book, world.history.decided(), world.history.finished())
        self.must(not wrong, "; ".join(wrong[:5]))

    def check_stall(self, struck: float) -> None:
        if not self.expected.trains:
            return
        longest = self.world.longest_step(struck)
        self.must(longest is not None, "the training loop printed no step")
        if longest is not None:
            self.found |= {"step_ms": longest.step_ms, "stall_ms": longest.stall_ms}
            limit = 1000 * STALL_LIMIT * PATIENCE
            self.must(longest.stall_ms < limit, f"a training step was held up for {longest.stall_ms:.0f} ms")
