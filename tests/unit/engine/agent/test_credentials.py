"""The operator's token, with real keys."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.integration.agent.tokens import AUDIENCE, NAME, NAMESPACE, Cluster

from weightsync_engine.agent import credentials
from weightsync_engine.agent.credentials import KeySource, TokenVerifier, Unauthorized


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return Cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def verifier(cluster: Cluster) -> TokenVerifier:
    return TokenVerifier.from_environment(cluster.environment())


async def refused(verifier: TokenVerifier, token: str) -> str:
    with pytest.raises(Unauthorized) as error:
        await verifier.verify(f"Bearer {token}")
    assert token not in str(error.value)
    return str(error.value)


async def test_the_operators_token_is_accepted(verifier: TokenVerifier, cluster: Cluster) -> None:
    await verifier.verify(f"Bearer {cluster.token()}")


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"aud": ["weightsync.dev/rl/other"]}, "another audience"),
        ({"aud": ["https://kubernetes.default.svc"]}, "another audience"),
        ({"aud": AUDIENCE + "/x"}, "another audience"),
        ({"sub": "system:serviceaccount:rl:default"}, "only 'system:serviceaccount:weightsync-system"),
        ({"exp": int(time.time()) - 60}, "expired"),
        ({"exp": None}, "no exp"),
        ({"aud": None}, "no aud"),
        ({"sub": None}, "no sub"),
    ],
)
async def test_a_token_for_something_else_is_refused(
    verifier: TokenVerifier, cluster: Cluster, claims: dict[str, Any], said: str
) -> None:
    assert said in await refused(verifier, cluster.token(**claims))


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "token"])
async def test_no_token_is_no_credential(verifier: TokenVerifier, header: str | None) -> None:
    with pytest.raises(Unauthorized, match="no bearer token"):
        await verifier.verify(header)


async def test_a_token_that_somebody_else_signed_is_refused(
    verifier: TokenVerifier, cluster: Cluster, tmp_path: Path
) -> None:
    assert "signature" in await refused(verifier, Cluster(tmp_path, kid=cluster.kid).token())


async def test_a_token_signed_with_the_public_key_as_secret_is_refused(
    verifier: TokenVerifier, cluster: Cluster
) -> None:
    pem = cluster.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    head, body = ({"alg": "HS256", "typ": "JWT", "kid": cluster.kid}, {"aud": AUDIENCE})
    text = b".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).rstrip(b"=") for p in (head, body))
    import hashlib
    import hmac

    signature = base64.urlsafe_b64encode(hmac.new(pem, text, hashlib.sha256).digest()).rstrip(b"=")
    assert "algorithm" in await refused(verifier, (text + b"." + signature).decode())


async def test_an_unsigned_token_is_refused(verifier: TokenVerifier) -> None:
    assert "algorithm" in await refused(verifier, jwt.encode({"aud": AUDIENCE}, "", algorithm="none"))


@pytest.mark.parametrize("token", ["abc", "a.b.c", "x" * 20000, "\x00.\x00.\x00"])
async def test_garbage_is_refused(verifier: TokenVerifier, token: str) -> None:
    assert await refused(verifier, token)


async def test_keys_that_the_cluster_rotates_are_fetched_again(
    verifier: TokenVerifier, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await verifier.verify(f"Bearer {cluster.token()}")
    cluster.rotate("key-of-another-day")
    assert "key is unknown" in await refused(verifier, cluster.token())
    cluster.write()
    assert "key is unknown" in await refused(verifier, cluster.token())  # not fetched again so soon
    monkeypatch.setattr(credentials, "REFRESH_SECONDS", 0.0)
    await verifier.verify(f"Bearer {cluster.token()}")


async def test_keys_that_cannot_be_read_refuse_and_are_asked_for_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.file.unlink()
    verifier = TokenVerifier.from_environment(cluster.environment())
    assert "key is unknown" in await refused(verifier, cluster.token())
    cluster.write()
    verifier._fetched = None
    await verifier.verify(f"Bearer {cluster.token()}")


async def test_elliptic_keys_work_too(tmp_path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    public = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(private.public_key())), "kid": "ec"}
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [{"kty": "unheard-of", "kid": "x"}, public]}))
    verifier = TokenVerifier(KeySource(str(file)), NAMESPACE, NAME, "weightsync-system:weightsync-operator")
    claims = {
        "aud": AUDIENCE,
        "sub": "system:serviceaccount:weightsync-system:weightsync-operator",
        "exp": int(time.time()) + 60,
    }
    await verifier.verify(f"Bearer {jwt.encode(claims, private, 'ES256', headers={'kid': 'ec'})}")


async def test_without_a_name_any_object_of_the_namespace_is_accepted_and_no_other(cluster: Cluster) -> None:
    environment = {k: v for k, v in cluster.environment().items() if k != "WEIGHTSYNC_NAME"}
    verifier = TokenVerifier.from_environment(environment)
    await verifier.verify(f"Bearer {cluster.token(aud=['weightsync.dev/rl/whatever'])}")
    assert "another audience" in await refused(verifier, cluster.token(aud=["weightsync.dev/other/policy"]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WEIGHTSYNC_OPERATOR": "no-colon"}, "WEIGHTSYNC_OPERATOR"),
        ({"WEIGHTSYNC_JWKS": "http://plain"}, "WEIGHTSYNC_JWKS"),
        ({"WEIGHTSYNC_JWKS": ""}, "WEIGHTSYNC_JWKS"),
        ({"WEIGHTSYNC_NAMESPACE": ""}, "WEIGHTSYNC_NAMESPACE"),
    ],
)
def test_an_environment_that_cannot_work_says_what_to_set(
    cluster: Cluster, changes: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TokenVerifier.from_environment({**cluster.environment(), **changes})


def test_in_a_pod_the_api_server_is_asked() -> None:
    environment = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert KeySource.of_cluster(environment).where == "https://[fd00::1]:6443/openid/v1/jwks"
