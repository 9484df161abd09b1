"""The decision of a round, asked for by a verified pod that has heard nothing, and signed by the lead's agent."""

from __future__ import annotations

import hashlib
import hmac

from ..messages import Message, RoundPhase
from .state import FINAL, Session, Verdict


class DecisionQuery(Message):
    """Query of `GET decision`. `signature`: `sign(key, "ask", object_uid, epoch, round, nonce)`."""

    object_uid: str
    epoch: int
    round: int
    nonce: str
    signature: str


class DecisionAnswer(Message):
    """`signature`: `sign(key, "answer", object_uid, epoch, round, nonce, verdict)`."""

    verdict: Verdict
    signature: str


def sign(key: str, *parts: object) -> str:
    """HMAC-SHA256 of the parts under the epoch's key, in hex."""
    text = "\n".join(str(part) for part in parts)
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def answer_decision(session: Session, query: DecisionQuery) -> DecisionAnswer | None:
    """What this agent knows of a decision; None without the epoch's key, or for a wrong signature."""
    verdict: Verdict = "unknown"
    keys = []
    epoch, round_ = session.epoch, session.round
    if session.object_uid == query.object_uid and epoch is not None and epoch.request.epoch == query.epoch:
        keys.append(epoch.request.key)
        if round_ is not None and (round_.epoch, round_.round) == (query.epoch, query.round):
            if round_.phase is RoundPhase.COMMITTED:
                verdict = "committed"
            elif round_.phase in FINAL:
                verdict = "aborted"
    for decided in session.decisions:
        if (decided.object_uid, decided.epoch) == (query.object_uid, query.epoch) and decided.key:
            keys.append(decided.key)
            if decided.round == query.round:
                verdict = decided.verdict
    said = ("ask", query.object_uid, query.epoch, query.round, query.nonce)
    for key in keys:
        if hmac.compare_digest(sign(key, *said), query.signature):
            return DecisionAnswer(verdict=verdict, signature=sign(key, "answer", *said[1:], verdict))
    return None
