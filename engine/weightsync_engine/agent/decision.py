"""The question that a verified pod asks the lead's agent when no decision came in time."""

from __future__ import annotations

import hmac
import secrets

import httpx

from ..protocol.messages import Rendezvous
from ..protocol.names import ROUTE_DECISION
from ..protocol.session import AskDecision, DecisionAnswer, Verdict, sign

MAX_ANSWER_BYTES = 4096


def url(place: Rendezvous, path: str) -> str:
    """http address of a pod's agent; IPv6 in brackets."""
    host = place.host.strip("[]")
    return f"http://[{host}]:{place.port}{path}" if ":" in host else f"http://{host}:{place.port}{path}"


async def ask_decision(ask: AskDecision, timeout: float) -> Verdict:
    """What the lead's agent says. Raises for no answer, and for one that the epoch's key did not sign."""
    nonce = secrets.token_hex(16)
    said = (ask.object_uid, ask.epoch, ask.round, nonce)
    query = {
        "object_uid": ask.object_uid,
        "epoch": str(ask.epoch),
        "round": str(ask.round),
        "nonce": nonce,
        "signature": sign(ask.key, "ask", *said),
    }
    # Pods are never behind a proxy of the environment.
    async with httpx.AsyncClient(trust_env=False, timeout=timeout, follow_redirects=False) as client:
        response = await client.get(url(ask.lead, ROUTE_DECISION), params=query)
    if response.status_code != 200 or len(response.content) > MAX_ANSWER_BYTES:
        raise ValueError(f"the lead's agent answered {response.status_code}")
    answer = DecisionAnswer.model_validate_json(response.content)
    if not hmac.compare_digest(sign(ask.key, "answer", *said, answer.verdict), answer.signature):
        raise ValueError("the answer was not signed with the epoch's key")
    return answer.verdict
