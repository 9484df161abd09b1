"""The order in which one plan is made."""

from __future__ import annotations

from dataclasses import replace

from ... import names
from ..members import Remark
from . import decided, epochs, undecided, upkeep
from .draft import Draft
from .questions import flip_failed, target
from .values import Memory, Observed, Plan, Settings


def plan(memory: Memory, observed: Observed, settings: Settings = Settings()) -> Plan:  # noqa: B008 (frozen)
    """Decides the next step of one object."""
    draft = Draft(memory, observed, settings)
    _note_membership(draft)
    _note_remarks(draft)
    decided.roll_forward(draft)
    if (run := draft.memory.round) is not None:
        if run.phase == "commit":
            decided.advance(draft, run)
        else:
            undecided.advance(draft, run)
    # Not `else`: a round that just ended may make room for the next step at once.
    if draft.memory.round is None and draft.record is None:
        if draft.memory.epoch is not None:
            epochs.advance(draft, draft.memory.epoch)
        _start_something(draft)
    if draft.record is None:
        upkeep.end_strays(draft)
        upkeep.tell_trainers(draft)
        upkeep.admit_or_fence(draft)
        upkeep.set_gates(draft)
        upkeep.watch_silence(draft)
    else:
        draft.sends, draft.reads, draft.wake_in = [], [], 0.0
    return draft.plan()


def _note_membership(draft: Draft) -> None:
    if draft.roster.fingerprint != draft.memory.membership or draft.memory.membership_since == float("-inf"):
        draft.memory = replace(draft.memory, membership=draft.roster.fingerprint, membership_since=draft.now)


def _note_remarks(draft: Draft) -> None:
    """One event for each thing that is wrong with a pod; a server that is still starting is not wrong."""
    worth: list[Remark] = [
        remark
        for remark in draft.roster.remarks
        if not remark.expected and remark.reason not in names.STARTING
    ]
    for remark in worth:
        if (remark.pod, remark.reason) not in draft.memory.noted:
            draft.event("Warning", remark.reason, remark.message, remark.pod)
    draft.memory = replace(draft.memory, noted=frozenset((remark.pod, remark.reason) for remark in worth))


def _start_something(draft: Draft) -> None:
    epoch, roster = draft.memory.epoch, draft.roster
    if draft.record is not None or roster.violation is not None or draft.spec.suspend:
        return
    if epoch is not None and not epoch.joined:
        return
    wanted = target(draft.seen, roster)
    # A flip that failed for good holds its pod in the old round, and only another epoch gets it out.
    stuck = any(m.state.round is not None and flip_failed(m.state.round) for m in roster.inference)
    stale = (
        epoch is None
        or stuck
        or epoch.keys != roster.fingerprint
        or epoch.transport != draft.spec.wire_transport
    )
    if stale:
        joiner = epoch is None or stuck or bool(roster.fingerprint - epoch.keys)
        if wanted is not None or joiner:
            epochs.begin(draft)
    elif wanted is not None and epoch is not None:
        undecided.begin(draft, epoch, wanted)
