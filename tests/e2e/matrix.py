"""The fault matrix, pure: which cells there are, what each must show, and which are not run, and why.

A cell is one fault of one part in one phase of a round. Cells whose beginnings are the same (a part is frozen for
good; it is frozen and thaws after the deadline) share one `Run`, in which they are judged one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Fault = Literal["kill", "stop", "stop+cont", "cut", "restart"]
"""SIGKILL; SIGSTOP; SIGSTOP and, after the deadline, SIGCONT; its network cut for a while; an orderly restart."""
Target = Literal[
    "operator", "api-server", "node", "trainer-rank", "trainer-mover", "agent", "vllm-server", "vllm-worker",
    "vllm-mover",
]  # fmt: skip
"""`agent`: that of the trainer's rank 0, which also holds the epoch's store. `node`: the one of the victim server."""
Phase = Literal["join", "prepare", "transfer", "verify", "commit"]

FAULTS: tuple[Fault, ...] = get_args(Fault)
TARGETS: tuple[Target, ...] = get_args(Target)
PHASES: tuple[Phase, ...] = get_args(Phase)

VICTIM, OTHER, LEAD, SECOND = "victim", "other", "trainer-0", "trainer-1"
"""Pods: the server that is hit, the other server, the trainer's two ranks."""


# ---- times, in seconds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deadlines:
    """Of the object under test: short, so that a cell takes seconds."""

    join: int = 16
    prepare: int = 8
    transfer: int = 15
    commit: int = 5

    @property
    def stall(self) -> float:
        """After so long without a step a peer is given up."""
        return self.transfer / 3


DEADLINES = Deadlines()
GRACE = 5.0
"""What the operator adds to a deadline, so that the agents' more exact message wins."""
SILENT = 5.0
"""An agent that refuses calls counts as silent after so long."""
UNANSWERED = 10.0 + SILENT
"""One that does not answer at all: an open long poll and its call run out first."""
LEASE = 15.0
OPERATOR_START = 8.0
AGENT_START = 4.0
LIVENESS = 35.0 + 5.0 + OPERATOR_START
"""The kubelet finds a frozen operator, gives it its grace, and starts another one."""
API_START = 45.0
"""A killed API server is back, and whoever lost it has noticed."""
OUTAGE = 12.0
"""How long a part that nobody can name is kept away."""
SLACK = 2.0
"""Recovery takes at most the detection deadline, this, and one round with its epoch, as measured before the cells."""
STALL_LIMIT = 1.0
"""No step of the training loop may be held up for longer, whatever happens to others."""


# ---- the cells ---------------------------------------------------------------------------------------------


Meanwhile = Literal["all", "others", "none"]


@dataclass(frozen=True)
class Expected:
    """What a run must show."""

    meanwhile: Meanwhile
    """Who serves the version that was on its way, before anything is undone: all servers, all but the victim, or
    nobody (then the old version is served on)."""
    within: float
    """Detection deadline: `meanwhile` holds, and the culprit of a fault that lasts is named, after this, `SLACK` and
    one round."""
    culprits: tuple[str, ...] = ()
    """One of these pods must be named by the object; empty: there is none to name."""
    lasting: bool = False
    """The fault stays until it is undone; only then all servers come to the version."""
    trains: bool = True
    """Training is not hit itself, so none of its steps may stall."""
    new_run: bool = False
    """The training process itself is lost: what was on its way may be, too; its successor publishes the next one."""


@dataclass(frozen=True)
class Run:
    """Cells that are carried out together, in the order of `faults`."""

    faults: tuple[Fault, ...]
    target: Target
    phase: Phase
    expected: Expected

    @property
    def id(self) -> str:
        return f"{self.faults[0]}-{self.target}-{self.phase}"


@dataclass(frozen=True)
class NotRun:
    fault: Fault
    target: Target
    phase: Phase
    reason: str


SMOKE = frozenset({
    "kill-vllm-mover-transfer", "stop-trainer-mover-join", "restart-operator-commit", "kill-agent-verify",
    "cut-vllm-server-prepare", "stop-vllm-server-verify",
})  # fmt: skip
"""CI's diagonal: every fault and every phase, cheap cells."""


def slow(run: Run) -> bool:
    """Whether a server, a node, the API server or the training itself has to start again in it."""
    starts = run.target in ("node", "trainer-rank", "vllm-server", "vllm-worker") and (
        run.faults[0] in ("kill", "restart")
    )
    return starts or run.target == "api-server" or (run.target == "operator" and run.faults == ("stop",))


def expected(fault: Fault, target: Target, phase: Phase) -> Expected | str:
    """What the cell must show, or why it is not run."""
    return _OF[target](fault, phase)


def runs() -> list[Run]:
    """All that is run, in diagonals: a session that is cut has seen something of every target and phase."""
    found = []
    for target in TARGETS:
        for fault in FAULTS:
            for phase in PHASES:
                cell = expected(fault, target, phase)
                if isinstance(cell, str):
                    continue
                if fault == "stop" and cell.lasting and _together(target, phase):
                    found.append(Run(("stop", "stop+cont"), target, phase, cell))
                elif not (fault == "stop+cont" and _together(target, phase)):
                    found.append(Run((fault,), target, phase, cell))
    return sorted(found, key=_diagonal)


def _diagonal(run: Run) -> tuple[int, int]:
    fault, target, phase = FAULTS.index(run.faults[0]), TARGETS.index(run.target), PHASES.index(run.phase)
    return (fault + 2 * target + phase) % len(PHASES) + len(PHASES) * (
        (2 * fault + target) % len(FAULTS)
    ), target


def not_run() -> Iterator[NotRun]:
    for target in TARGETS:
        for fault in FAULTS:
            for phase in PHASES:
                found = expected(fault, target, phase)
                if isinstance(found, str):
                    yield NotRun(fault, target, phase, found)


def _together(target: Target, phase: Phase) -> bool:
    """Whether "stop" and "stop+cont" begin alike: nobody ends the frozen part by itself."""
    frozen, thawed = expected("stop", target, phase), expected("stop+cont", target, phase)
    return isinstance(frozen, Expected) and frozen == thawed and frozen.lasting


# ---- by target ---------------------------------------------------------------------------------------------


def _operator(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill" | "restart":
            return Expected("all", OPERATOR_START)
        case "stop":
            return Expected("all", LIVENESS)
        case "stop+cont":
            return Expected("none", LEASE, lasting=True)
        case "cut":
            return Expected("none", OUTAGE, lasting=True)


def _api_server(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill" | "restart":
            return Expected("all", API_START)
        case "stop":
            return (
                "the kubelet ends a frozen API server by its liveness probe after 80 s; from there on it is as "
                "kill, and until then as stop+cont"
            )
        case _:
            return Expected("none", OUTAGE, lasting=True)


def _node(fault: Fault, phase: Phase) -> Expected | str:
    return Expected("others", UNANSWERED, (VICTIM,), lasting=fault != "restart")


def _trainer_rank(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "stop" | "stop+cont":
            # Its mover and its agent go on: the round does not even notice.
            return Expected("all", 0.0, lasting=True, trains=False)
        case "cut":
            if phase == "commit":
                return Expected("all", 0.0, lasting=True, trains=False)
            return Expected("none", UNANSWERED, (SECOND,), lasting=True, trains=False)
        case _:
            if phase == "commit":
                return Expected("all", 0.0, trains=False, new_run=True)
            return Expected("none", UNANSWERED, (LEAD, SECOND), trains=False, new_run=True)


def _trainer_mover(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill":
            return Expected("all", 0.0, () if phase == "commit" else (SECOND,))
        case "stop" | "stop+cont":
            return _frozen_mover(fault, phase, SECOND)
        case "cut":
            # The link between it and the servers: either end may be named.
            return _cut_data_path(phase, (SECOND, VICTIM, OTHER))
        case "restart":
            return _NO_GRACEFUL_END


def _vllm_mover(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill":
            return Expected("all", 0.0, () if phase == "commit" else (VICTIM,))
        case "stop" | "stop+cont":
            return _frozen_mover(fault, phase, VICTIM)
        case "cut":
            return _cut_data_path(phase, (VICTIM,))
        case "restart":
            return _NO_GRACEFUL_END


_NO_GRACEFUL_END = "a mover handles no SIGTERM: to end it is to kill it"


def _frozen_mover(fault: Fault, phase: Phase, pod: str) -> Expected | str:
    if phase in ("verify", "commit"):
        # It has done its part of this round. The next one finds it frozen: that is a cell of "prepare".
        return Expected("all", 0.0, lasting=True)
    if fault == "stop+cont":
        return "its agent kills a frozen mover at the deadline: nothing is left to continue"
    return Expected("all", DEADLINES.join if phase == "join" else DEADLINES.stall, (pod,))


def _cut_data_path(phase: Phase, culprits: tuple[str, ...]) -> Expected:
    if phase in ("verify", "commit"):
        return Expected("all", 0.0, lasting=True)
    return Expected("none", DEADLINES.join if phase == "join" else DEADLINES.stall, culprits, lasting=True)


def _agent(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill" | "restart":
            return Expected("all", AGENT_START, () if phase == "commit" else (LEAD,))
        case _:
            if phase == "commit":
                return Expected("all", DEADLINES.commit + GRACE, lasting=True)
            return Expected("none", UNANSWERED, (LEAD,), lasting=True)


def _vllm_server(fault: Fault, phase: Phase) -> Expected | str:
    if fault == "restart":
        # Terminating pods leave at once; with a decision on record nobody is to blame.
        return Expected("others", 0.0, () if phase in ("join", "commit", "verify") else (VICTIM,))
    if fault == "kill":
        return Expected("others", SILENT, () if phase == "commit" else (VICTIM,))
    return Expected("others", UNANSWERED, (VICTIM,), lasting=True)


def _vllm_worker(fault: Fault, phase: Phase) -> Expected | str:
    match fault:
        case "kill":
            return _vllm_server(fault, phase)
        case "stop" | "stop+cont":
            # Noticed where it is needed: at the flip.
            return Expected("others", DEADLINES.commit + GRACE, (VICTIM,), lasting=True)
        case "cut":
            return "a worker has no network but its pod's: see vllm-server"
        case "restart":
            return "a worker lives and dies with its server: see vllm-server"


_OF = {
    "operator": _operator,
    "api-server": _api_server,
    "node": _node,
    "trainer-rank": _trainer_rank,
    "trainer-mover": _trainer_mover,
    "agent": _agent,
    "vllm-server": _vllm_server,
    "vllm-worker": _vllm_worker,
    "vllm-mover": _vllm_mover,
}


# ---- the table for people ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one run showed. Times in seconds after the fault, or after it was undone."""

    run: str
    faults: tuple[Fault, ...]
    target: Target
    phase: Phase
    passed: bool
    meanwhile: Meanwhile
    meanwhile_s: float | None = None
    allowed_s: float | None = None
    healed_s: float | None = None
    """From the fault (from its end, where it lasts) until every server serves the newest version."""
    step_ms: float | None = None
    """The training loop's longest step; None where training itself was hit."""
    stall_ms: float | None = None
    """The longest step without the time in which no core was free for it: what `STALL_LIMIT` is for."""
    named: str = ""
    """The culprit, as the object named it."""
    answers: int = 0
    load: float = 0.0
    """Of the machine, over the minute before the fault: times depend on it."""
    trouble: str = ""


def table(results: list[Result]) -> str:
    """Markdown: one row for each run, then what is not run."""
    rows = [
        "| fault | target | phase | | who had it meanwhile | after s (allowed) | all healed after s | step, stall ms "
        "| named | answers | load | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (TARGETS.index(r.target), r.faults, PHASES.index(r.phase))):
        after = "" if r.meanwhile_s is None else f"{r.meanwhile_s:.1f} ({r.allowed_s:.1f})"
        rows.append(
            f"| {', '.join(r.faults)} | {r.target} | {r.phase} | {'ok' if r.passed else 'FAILED'} | {r.meanwhile} "
            f"| {after} | {_seconds(r.healed_s)} | {_pair(r.step_ms, r.stall_ms)} | {r.named} "
            f"| {r.answers} | {r.load:.0f} | {' '.join(r.trouble.replace('|', '/').split())[:200]} |"
        )
    rows += ["", "Not run:", ""]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for cell in not_run():
        reasons.setdefault((cell.fault, cell.target, cell.reason), []).append(cell.phase)
    for (fault, target, reason), phases in reasons.items():
        rows.append(f"- {fault} x {target} x {', '.join(phases)}: {reason}")
    done = {r.run for r in results}
    if missing := [run.id for run in runs() if run.id not in done]:
        rows += ["", f"Not reached ({len(missing)}): {', '.join(missing)}"]
    return "\n".join(rows) + "\n"


def _pair(step: float | None, stall: float | None) -> str:
    return ", ".join("-" if value is None else f"{value:.0f}" for value in (step, stall))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
