"""Conditions as chains of small checks: the first violation gives the reason and the message."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from weightsync_engine.protocol.messages import Published

from .. import names
from ..api.types import Condition
from .members import Roster
from .rounds import (
    UNCHANGED,
    Memory,
    Observed,
    Settings,
    committed_version,
    holds,
    may_generate,
    published,
    refused_rollback,
    serves,
    target,
    unchanged,
)

Status = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Verdict:
    status: Status
    reason: str
    message: str


@dataclass(frozen=True)
class View:
    """All that a check may look at."""

    memory: Memory
    observed: Observed
    roster: Roster
    settings: Settings


Check = Callable[[View], Verdict | None]
"""None: nothing against it."""


def _first(view: View, checks: Sequence[Check], otherwise: Verdict) -> Verdict:
    for check in checks:
        verdict = check(view)
        if verdict is not None:
            return verdict
    return otherwise


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- members -----------------------------------------------------------------------------------------------


def _no_complete_set(view: View) -> Verdict | None:
    violation = view.roster.violation
    return Verdict("False", violation.reason, violation.message) if violation else None


def _a_pod_is_not_right(view: View) -> Verdict | None:
    wrong = [remark for remark in view.roster.remarks if not remark.expected]
    if not wrong:
        return None
    # What a person must mend comes before a pod that is only starting.
    wrong.sort(key=lambda remark: (remark.reason in names.STARTING, remark.takes_part))
    more = f" (and {_count(len(wrong) - 1, 'other pod')})" if len(wrong) > 1 else ""
    return Verdict("False", wrong[0].reason, wrong[0].message + more)


def members_resolved(view: View) -> Verdict:
    roster = view.roster
    return _first(
        view,
        (_no_complete_set, _a_pod_is_not_right),
        Verdict(
            "True",
            names.RESOLVED,
            f"{_count(roster.trainer_ranks, 'trainer rank')} in {_count(len(roster.trainers), 'pod')}, "
            f"{_count(roster.world_size - roster.trainer_ranks, 'vLLM worker')} in "
            f"{_count(len(roster.inference), 'pod')}",
        ),
    )


# ---- epoch -------------------------------------------------------------------------------------------------


def _epoch_failed(view: View) -> Verdict | None:
    failure = view.memory.failure
    if failure is None or failure.what != "epoch" or view.memory.epoch is not None:
        return None
    return Verdict("False", failure.reason, failure.message)


def _epoch_under_way(view: View) -> Verdict | None:
    epoch = view.memory.epoch
    if epoch is None or epoch.joined:
        return None
    failure = view.memory.failure
    again = f"; before: {failure.message}" if failure is not None and failure.what == "epoch" else ""
    return Verdict(
        "Unknown", names.BUILDING_EPOCH, f"{_count(len(epoch.fact.members), 'pod')} are joining{again}"
    )


def _no_epoch(view: View) -> Verdict | None:
    if view.memory.epoch is not None:
        return None
    return Verdict("Unknown", names.NO_EPOCH, "waits for the members")


def rendezvous_established(view: View) -> Verdict:
    epoch = view.memory.epoch
    members = len(epoch.fact.members) if epoch else 0
    return _first(
        view,
        (_epoch_failed, _no_epoch, _epoch_under_way),
        Verdict("True", names.ESTABLISHED, f"{_count(members, 'pod')} are connected"),
    )


def plan_resolved(view: View) -> Verdict:
    epoch = view.memory.epoch
    summary = epoch.plan if epoch else None
    message = ""
    if summary is not None:
        message = (
            f"{_count(summary.parameters, 'parameter')}, {summary.bytes_total / 1e9:.3g} GB, "
            f"{_count(summary.steps, 'step')}; {summary.direct} direct, {summary.fallback} by vLLM's loader"
        )
        if summary.draft:
            message += f", {summary.draft} for draft models alone"
        if summary.unused:
            message += f", {summary.unused} not sent: vLLM has no use for them"
        if summary.rounded:
            message += f"; {summary.rounding}"
        if summary.reasons:
            message += f" ({'; '.join(summary.reasons)})"
    return _first(
        view, (_epoch_failed, _no_epoch, _epoch_under_way), Verdict("True", names.RESOLVED, message[:2000])
    )


# ---- versions ----------------------------------------------------------------------------------------------


def _no_version_yet(view: View) -> Verdict | None:
    if committed_version(view.observed.facts) is not None:
        return None
    return Verdict("False", names.NO_VERSION_YET, "no version has been committed yet" + _wanted(view))


def _wanted(view: View) -> str:
    wanted = view.observed.spec.wanted_version
    if wanted is None:
        return "; the trainer has published none" if published(view.roster) is None else ""
    have = published(view.roster)
    if have is not None and have.version == wanted:
        return ""
    return f"; {_not_held(wanted, have)}"


def _not_held(wanted: str, have: Published | None) -> str:
    held = have.version if have else "nothing"
    return f"spec.trigger.version {wanted} is not what the trainer holds ({held})"


def _rollback_not_allowed(view: View) -> Verdict | None:
    refused = refused_rollback(view.observed, view.roster)
    if refused is None:
        return None
    return Verdict(
        "False",
        names.ROLLBACK_NOT_ALLOWED,
        f"spec.trigger.version {refused} came before {committed_version(view.observed.facts)}, which is served; to go "
        "back to it, set spec.trigger.allowRollback to true",
    )


def _spec_version_not_published(view: View) -> Verdict | None:
    wanted = view.observed.spec.wanted_version
    if wanted is None or wanted == committed_version(view.observed.facts):
        return None
    have = published(view.roster)
    if have is not None and have.version == wanted:
        return None
    return Verdict("False", names.VERSION_NOT_PUBLISHED, _not_held(wanted, have))


def _behind(view: View) -> list[str]:
    return [
        member.pod
        for member in view.roster.inference
        if not serves(view.memory, view.observed, member, view.settings)
    ]


def _pods_behind(view: View) -> Verdict | None:
    behind = _behind(view)
    if not behind:
        return None
    version = committed_version(view.observed.facts)
    told = ", ".join(behind[:5]) + (f" and {len(behind) - 5} more" if len(behind) > 5 else "")
    have = published(view.roster)
    torn = [
        (member.pod, member.state.inference.closed_because)
        for member in view.roster.inference
        if member.state.inference is not None and member.state.inference.torn
    ]
    if torn:
        pod, because = torn[0]
        more = f" (and {len(torn) - 1} more pods)" if len(torn) > 1 else ""
        why = because or "its live weights are of no one version"
        return Verdict("False", names.TORN, f"pod {pod}{more}: {why}")
    waits = [
        member.pod
        for member in view.roster.inference
        if member.state.inference is not None
        and not holds(member.state.inference, view.observed.facts, view.observed.spec)
    ]
    if waits and view.memory.round is None and target(view.observed, view.roster) is None:
        return Verdict(
            "False",
            names.VERSION_UNAVAILABLE,
            f"{told}: needs {version}, which the trainer no longer holds "
            f"({have.version if have else 'it has published nothing'}); kept from serving "
            "until the next publish",
        )
    return Verdict("False", names.OUT_OF_SYNC, f"not serving {version}: {told}")


def in_sync(view: View) -> Verdict:
    facts = view.observed.facts
    return _first(
        view,
        (
            _no_version_yet,
            _rollback_not_allowed,
            _spec_version_not_published,
            _no_members_to_ask,
            _pods_behind,
        ),
        _payload(
            view, f"{_count(len(view.roster.inference), 'inference pod')} serve {committed_version(facts)}"
        ),
    )


def _payload(view: View, told: str) -> Verdict:
    """In sync, and whether what arrives is news at all."""
    if unchanged(view.memory.last_committed):
        return Verdict("True", names.PAYLOAD_UNCHANGED, f"{told}; payload unchanged: {UNCHANGED}")
    return Verdict("True", names.IN_SYNC_REASON, told)


def _no_members_to_ask(view: View) -> Verdict | None:
    if view.roster.inference:
        return None
    return Verdict("Unknown", names.NO_INFERENCE_PODS, "no inference pod answers")


# ---- the summary -------------------------------------------------------------------------------------------


def _last_attempt_failed(view: View) -> Verdict | None:
    failure = view.memory.failure
    if failure is None:
        return None
    what = "building the epoch failed" if failure.what == "epoch" else f"version {failure.version} failed"
    return Verdict(
        "False",
        names.EPOCH_FAILED if failure.what == "epoch" else names.ROUND_FAILED,
        f"{what}: {failure.message} ({failure.reason}); {_count(failure.failures, 'attempt')}, tried again",
    )


def _of(condition: Callable[[View], Verdict]) -> Check:
    """As a check of the summary: anything but True is against it."""

    def check(view: View) -> Verdict | None:
        verdict = condition(view)
        return None if verdict.status == "True" else Verdict("False", verdict.reason, verdict.message)

    return check


def _before_first_version(view: View) -> Verdict | None:
    """Ready may not wait for the first publish: what installs the trainer may wait for Ready."""
    if committed_version(view.observed.facts) is not None or view.observed.spec.closed_before_first_version:
        return None
    # Once a version is committed, the next epoch is no matter of readiness; before, it shows what
    # will not work.
    for condition in (plan_resolved, rendezvous_established):
        verdict = condition(view)
        if verdict.status != "True":
            return Verdict("False", verdict.reason, verdict.message)
    # Pods that must still open, or a publish that is under way, are no reason to call it ready.
    if _behind(view) or view.memory.round is not None or target(view.observed, view.roster) is not None:
        return None
    return Verdict("True", names.WAITING_FOR_FIRST_VERSION, "all is set up" + _wanted(view))


def ready(view: View) -> Verdict:
    sync = in_sync(view)
    return _first(
        view,
        (
            _of(members_resolved),
            _last_attempt_failed,
            _before_first_version,
            _of(in_sync),
        ),
        Verdict("True", sync.reason, sync.message),
    )


def _moving(view: View) -> str:
    """The pods that have not halted for the round under way."""
    run, facts = view.memory.round, view.observed.facts
    if run is None or run.phase != "halt":
        return ""
    names_ = [pod.name for pod in view.observed.pods if may_generate(pod, facts.term, run.number)]
    return ", ".join(names_[:5]) + (f" and {len(names_) - 5} more" if len(names_) > 5 else "")


def reconciling(view: View) -> Verdict:
    memory, spec = view.memory, view.observed.spec
    run = memory.round
    if run is not None:
        words = {
            "prepare": "members are getting ready",
            "transfer": "weights are travelling",
            "halt": f"verified on all members, the barrier waits for {_moving(view)}",
            "confirm": "verified on all members, being confirmed",
            "commit": "decided, going live",
        }
        return Verdict(
            "True", names.ROUND_RUNNING, f"round {run.number}, version {run.version}: {words[run.phase]}"
        )
    if memory.epoch is not None and not memory.epoch.joined:
        return Verdict("True", names.BUILDING_EPOCH, f"epoch {memory.epoch.fact.number} is being built")
    if spec.suspend:
        return Verdict("False", names.SUSPENDED, "spec.suspend is true: no round or epoch is started")
    if view.roster.violation is not None:
        return Verdict("True", view.roster.violation.reason, view.roster.violation.message)
    if memory.failure is not None:
        return Verdict("True", names.RETRYING, f"tried again after: {memory.failure.message}")
    if memory.epoch is None or target(view.observed, view.roster) is not None:
        return Verdict("True", names.PROGRESSING, "about to begin")
    return Verdict("False", names.IDLE, "nothing to do")


def stalled(view: View) -> Verdict:
    violation, failure = view.roster.violation, view.memory.failure
    if violation is not None and violation.needs_a_person:
        return Verdict("True", violation.reason, violation.message)
    if (rollback := _rollback_not_allowed(view)) is not None:
        return Verdict("True", rollback.reason, rollback.message)
    if failure is not None and failure.failures >= 3:
        return Verdict(
            "True",
            failure.reason,
            f"{failure.failures} attempts in a row failed the same way: {failure.message}",
        )
    return Verdict("False", names.PROGRESSING, "")


_ALL: tuple[tuple[str, Callable[[View], Verdict]], ...] = (
    (names.READY, ready),
    (names.MEMBERS_RESOLVED, members_resolved),
    (names.PLAN_RESOLVED, plan_resolved),
    (names.RENDEZVOUS_ESTABLISHED, rendezvous_established),
    (names.IN_SYNC, in_sync),
    (names.RECONCILING, reconciling),
    (names.STALLED, stalled),
)


def evaluate(
    memory: Memory,
    observed: Observed,
    roster: Roster,
    before: Iterable[Condition],
    settings: Settings,
) -> tuple[Condition, ...]:
    """All conditions, with the transition time of `before` where the status is still the same."""
    view, since = View(memory, observed, roster, settings), {item.type: item for item in before}
    now = observed.wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    out = []
    for kind, judge in _ALL:
        verdict = judge(view)
        old = since.get(kind)
        same = old is not None and old.status == verdict.status
        out.append(
            Condition(
                type=kind,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message[:2000],
                observed_generation=observed.generation,
                last_transition_time=old.last_transition_time if same and old is not None else now,
            )
        )
    return tuple(out)
