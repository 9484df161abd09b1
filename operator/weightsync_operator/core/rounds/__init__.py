"""The planner: what is durable, remembered and seen now -> what to record, send and show next.

`plan` is called again and again with whatever is true at that moment (level-triggered): it repeats a
request until the agent's own state shows its effect, so lost answers, duplicate events and restarts change
nothing but latency.

Order of things that must never break:

* Nothing is sent for an epoch before `Facts.epoch` holds it, no commit before `Facts.decision` holds the
  round. When a plan asks for facts, its caller records them (with a precondition) before it calls `plan`
  again.
* A decision needs every member's VERIFIED in an answer to a request that was sent after all were seen
  verified.
* With a barrier, no decision before every pod that may generate has confirmed that it has halted for the round, and no
  pod is admitted between.
* An unfinished decision is rolled forward by every operator; any other unfinished round is aborted.
"""

from .planner import plan
from .questions import (
    UNCHANGED,
    committed_version,
    committing,
    epoch_state,
    holds,
    may_generate,
    published,
    refused_rollback,
    round_state,
    serves,
    target,
    unchanged,
    usable_host,
)
from .values import (
    EpochRun,
    EventNote,
    Failure,
    GateChange,
    Memory,
    Observed,
    Plan,
    RoundRun,
    Send,
    Settings,
)

__all__ = [
    "UNCHANGED",
    "EpochRun",
    "EventNote",
    "Failure",
    "GateChange",
    "Memory",
    "Observed",
    "Plan",
    "RoundRun",
    "Send",
    "Settings",
    "committed_version",
    "committing",
    "epoch_state",
    "holds",
    "may_generate",
    "plan",
    "published",
    "refused_rollback",
    "round_state",
    "serves",
    "target",
    "unchanged",
    "usable_host",
]
