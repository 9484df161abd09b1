"""The operator's credential: a short-lived token of its own service account, for one object each."""

from __future__ import annotations

import asyncio
import datetime
import time
from dataclasses import dataclass

from weightsync_engine.protocol.names import audience

from .kube import Kube

LIFETIME = 3600
"""Seconds asked for; the API server may give less."""


@dataclass(frozen=True)
class _Token:
    text: str
    got: float
    renew_at: float


class Tokens:
    """Asks the API server once an object and lifetime; agents verify offline."""

    def __init__(self, kube: Kube, account: str) -> None:
        """`account` is the operator's service account as `namespace:name`. Raises ValueError for another
        form."""
        namespace, _, name = account.partition(":")
        if not namespace or not name:
            raise ValueError(f"the service account must be given as <namespace>:<name>, not {account!r}")
        self._kube = kube
        self._path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        self._tokens: dict[tuple[str, str], _Token] = {}
        self._lock = asyncio.Lock()

    async def get(self, namespace: str, name: str) -> str:
        """A token for this object that is good for some time. Raises KubeError or KubeUnavailable."""
        async with self._lock:
            token = self._tokens.get((namespace, name))
            now = time.monotonic()
            if token is None or now >= token.renew_at:
                answer = await self._kube.request(
                    "POST",
                    self._path,
                    body={
                        "apiVersion": "authentication.k8s.io/v1",
                        "kind": "TokenRequest",
                        "spec": {"audiences": [audience(namespace, name)], "expirationSeconds": LIFETIME},
                    },
                )
                status = answer["status"]
                expires = datetime.datetime.fromisoformat(status["expirationTimestamp"])
                left = (expires - datetime.datetime.now(datetime.UTC)).total_seconds()
                token = _Token(status["token"], now, now + max(10.0, 0.7 * left))
                self._tokens[namespace, name] = token
            return token.text

    def distrust(self, namespace: str, name: str) -> None:
        """An agent refused the token: ask for a new one, but not again and again."""
        token = self._tokens.get((namespace, name))
        if token is not None and time.monotonic() - token.got > 30:
            del self._tokens[namespace, name]

    def forget(self, namespace: str, name: str) -> None:
        self._tokens.pop((namespace, name), None)
