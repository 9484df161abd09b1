"""The operator's credential, verified offline: a service account token for this very WeightSync object.

The operator asks the API server for a short-lived token of its own service account, with the audience
`weightsync.dev/<namespace>/<name>`. Here it is checked with the cluster's public keys. No secret is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import httpx
import jwt

from ..protocol.names import (
    DEFAULT_OPERATOR,
    ENV_JWKS,
    ENV_NAME,
    ENV_NAMESPACE,
    ENV_OPERATOR,
    GROUP,
    audience,
)

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric only: with a symmetric one, whoever can read the public keys could make tokens."""
LEEWAY_SECONDS = 10
REFRESH_SECONDS = 10.0
"""An unknown key id makes the keys be fetched again, at most this often."""
FETCH_SECONDS = 5.0
MAX_KEYS_BYTES = 1 << 20
MAX_TOKEN_BYTES = 16 * 1024
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Unauthorized(Exception):
    """The request's credential is missing or not good; the message says why, and holds nothing secret."""


class Verifier(Protocol):
    async def verify(self, authorization: str | None) -> None:
        """Check the Authorization header. Raises `Unauthorized`."""


class KeySource:
    """The cluster's public keys: a JWKS file, or an https address, by default the API server's."""

    def __init__(self, where: str, service_account: Path = SERVICE_ACCOUNT) -> None:
        if "://" in where and not where.startswith("https://"):
            raise ValueError(f"{ENV_JWKS} is a file or an https address, not {where!r}")
        self.where = where
        self._service_account = service_account

    @classmethod
    def of_cluster(cls, environ: Mapping[str, str]) -> KeySource:
        """The API server that Kubernetes names to every container. Raises ValueError outside of a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError(f"this is no pod of a cluster: name the file of its public keys in {ENV_JWKS}")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}/openid/v1/jwks")

    async def fetch(self) -> dict[str | None, jwt.PyJWK]:
        """Key id -> key. Raises OSError, ValueError or httpx.HTTPError."""
        text = await self._text()
        if len(text) > MAX_KEYS_BYTES:
            raise ValueError(f"{self.where} is larger than {MAX_KEYS_BYTES} bytes")
        keys: dict[str | None, jwt.PyJWK] = {}
        for data in json.loads(text).get("keys", []):
            try:
                key = jwt.PyJWK(data)
            except jwt.PyJWTError:
                log.warning("%s: a key of type %r cannot be used", self.where, data.get("kty"))
                continue
            keys[key.key_id] = key
        if not keys:
            raise ValueError(f"{self.where} holds no public key")
        return keys

    async def _text(self) -> bytes:
        if not self.where.startswith("https://"):
            return await asyncio.to_thread(Path(self.where).read_bytes)
        headers = {}
        ca, token = self._service_account / "ca.crt", self._service_account / "token"
        context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        if token.exists():
            headers["Authorization"] = f"Bearer {token.read_text().strip()}"
        async with httpx.AsyncClient(verify=context, trust_env=False, timeout=FETCH_SECONDS) as client:
            response = await asyncio.wait_for(client.get(self.where, headers=headers), 2 * FETCH_SECONDS)
        response.raise_for_status()
        return response.content


class TokenVerifier:
    """Accepts the operator's tokens for one object, or for any of the namespace.

    `operator`: its service account, `namespace:name`.
    """

    def __init__(self, keys: KeySource, namespace: str, name: str | None, operator: str) -> None:
        if operator.count(":") != 1 or not all(operator.split(":")):
            raise ValueError(f"{ENV_OPERATOR} is `namespace:name` of a service account, not {operator!r}")
        self.keys = keys
        self.namespace, self.name = namespace, name
        self.subject = f"system:serviceaccount:{operator}"
        self._known: dict[str | None, jwt.PyJWK] = {}
        self._fetched: float | None = None
        self._lock = asyncio.Lock()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TokenVerifier:
        """As the pod's environment says. Raises ValueError with what to set."""
        environ = os.environ if environ is None else environ
        where = environ.get(ENV_JWKS)
        keys = KeySource(where) if where else KeySource.of_cluster(environ)
        namespace = environ.get(ENV_NAMESPACE, "")
        if not namespace:
            try:
                namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
            except OSError:
                raise ValueError(f"the pod's namespace is unknown: set {ENV_NAMESPACE}") from None
        return cls(
            keys, namespace, environ.get(ENV_NAME) or None, environ.get(ENV_OPERATOR) or DEFAULT_OPERATOR
        )

    async def verify(self, authorization: str | None) -> None:
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized("no bearer token")
        if len(token) > MAX_TOKEN_BYTES:
            raise Unauthorized("the token is too long")
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise Unauthorized("the token is malformed") from None
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            raise Unauthorized("the token's algorithm is not accepted")
        key = await self._key(header.get("kid"))
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "aud", "sub"], "verify_aud": False, "verify_iat": False},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("the token has expired") from None
        except jwt.MissingRequiredClaimError as e:
            raise Unauthorized(f"the token has no {e.claim}") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise Unauthorized("the token's signature is wrong") from None
        if claims["sub"] != self.subject:
            raise Unauthorized(f"the token is of {claims['sub']!r}, only {self.subject!r} may speak here")
        said = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
        if not any(isinstance(a, str) and self._mine(a) for a in said):
            wanted = audience(self.namespace, self.name or "<name>")
            raise Unauthorized(f"the token is for another audience than {wanted!r}")

    def _mine(self, said: str) -> bool:
        if self.name is not None:
            return said == audience(self.namespace, self.name)
        return said.startswith(f"{GROUP}/{self.namespace}/") and said.count("/") == 2

    async def _key(self, key_id: str | None) -> jwt.PyJWK:
        if (key := self._find(key_id)) is not None:
            return key
        async with self._lock:
            if (key := self._find(key_id)) is not None:
                return key
            now = time.monotonic()
            if self._fetched is None or now - self._fetched >= REFRESH_SECONDS:
                self._fetched = now
                try:
                    self._known = await self.keys.fetch()
                except Exception as e:
                    log.error("the cluster's public keys cannot be read from %s: %s", self.keys.where, e)
        if (key := self._find(key_id)) is None:
            raise Unauthorized("the token's key is unknown here")
        return key

    def _find(self, key_id: str | None) -> jwt.PyJWK | None:
        if key_id is None and len(self._known) == 1:
            return next(iter(self._known.values()))
        return self._known.get(key_id)
