"""No secret leaves a machine in a report, and what a report is for stays in it."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.cli.redact import arguments, redact, value

JWT = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJl_-x"
KEY = secrets.token_hex(32)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"GET /state Authorization: Bearer {JWT}", JWT),
        (f"token {JWT} refused", JWT),
        (f"bearer {'q' * 20}", "q" * 20),
        (f"JoinEpoch(epoch=3, key='{KEY}', lead=x)", KEY),
        (f"left over {KEY} in a log", KEY),
        ("HF_TOKEN=abc123def", "abc123def"),
        ("HF_HUB hf_abcdefghijklmnop", "hf_abcdefghijklmnop"),
        ('{"api_key": "s p a c e s", "model": "m"}', "s p a c e s"),
        ("apiKey: 12345", "12345"),
        ("clientSecret: rose", "rose"),
        ("password = hunter2", "hunter2"),
        ("vllm serve --api-key hunter2 --port 8000", "hunter2"),
        ("proxy http://me:hunter2@proxy:3128 is used", "hunter2"),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABCDEFGHIJKLMNOP"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----\nafter", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "MIIE"),
    ],
)
def test_secrets_are_taken_out_of_text(text, secret):
    assert secret in text
    assert secret not in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "rank 5 (pod vllm-1, worker 1) has not started step 132 of 399 for 30 s",
        "max_num_batched_tokens=8192, max_tokens: 16",
        "--max-num-batched-tokens 8192 --port 8000",
        "image ghcr.io/x/vllm@sha256:" + "ab" * 32,
        "plan " + "0f" * 16,
        "uid 7d9f3a52-0000-4000-8000-000000000001",
        "http://10.0.0.1:8000/readyz: HTTP 503",
    ],
)
def test_what_a_report_is_for_stays(text):
    assert redact(text) == text


def test_settings_are_judged_by_their_names():
    assert value("VLLM_API_KEY", "x") == "<removed>"
    assert value("NCCL_DEBUG", "INFO") == "INFO"
    assert value("WEIGHTSYNC_STEP_BYTES", "1024") == "1024"
    assert value("VLLM_MAX_TOKENS", "128") == "128"
    assert value("WANDB_API_KEY", "") == ""


def test_command_lines_lose_the_values_of_secret_flags_only():
    words = [
        "vllm",
        "serve",
        "m",
        "--api-key",
        "abc",
        "--hf-token=def",
        "--port",
        "8000",
        "--max-tokens",
        "5",
    ]
    assert " ".join(arguments(words)) == (
        "vllm serve m --api-key <removed> --hf-token=<removed> --port 8000 --max-tokens 5"
    )


@given(st.text(max_size=300))
def test_any_text_is_redacted_once_and_for_all(text):
    once = redact(text)
    assert redact(once) == once
