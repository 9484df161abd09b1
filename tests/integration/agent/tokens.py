"""A cluster's signing key, its public keys as a file, and tokens as its API server makes them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

NAMESPACE, NAME = "rl", "policy"
AUDIENCE = f"weightsync.dev/{NAMESPACE}/{NAME}"
OPERATOR = "system:serviceaccount:weightsync-system:weightsync-operator"


class Cluster:
    def __init__(self, folder: Path, kid: str = "key-1") -> None:
        self.kid = kid
        self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.file = folder / "jwks.json"
        self.write()

    def public(self) -> dict[str, Any]:
        data = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.private.public_key()))
        return {**data, "kid": self.kid, "use": "sig", "alg": "RS256"}

    def write(self) -> None:
        self.file.write_text(json.dumps({"keys": [self.public()]}))

    def rotate(self, kid: str) -> None:
        """Another key signs from now on; the file of public keys is not written yet."""
        self.kid = kid
        self.private = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def token(self, **claims: Any) -> str:
        """The operator's token, with other claims where given; None leaves a claim out."""
        said: dict[str, Any] = {
            "aud": [AUDIENCE],
            "sub": OPERATOR,
            "iss": "https://kubernetes.default.svc.cluster.local",
            "iat": int(time.time()),
            "exp": int(time.time()) + 600,
            **claims,
        }
        said = {k: v for k, v in said.items() if v is not None}
        return jwt.encode(said, self.private, algorithm="RS256", headers={"kid": self.kid})

    def environment(self) -> dict[str, str]:
        """For an agent of this cluster."""
        return {
            "WEIGHTSYNC_JWKS": str(self.file),
            "WEIGHTSYNC_NAMESPACE": NAMESPACE,
            "WEIGHTSYNC_NAME": NAME,
            "WEIGHTSYNC_PORT": "0",
        }
