"""What M2N is told of its own buffers. The transports themselves need GPUs: tests/gpu."""

from __future__ import annotations

import dataclasses
import os

import pytest

from weightsync_engine.mover.memory import staging_bytes
from weightsync_engine.plan.validate import M2N
from weightsync_engine.protocol.names import ENV_STAGING_MIB, ENV_STEP_BYTES
from weightsync_engine.transport.failure import Failure
from weightsync_engine.transport.nccl import M2NTransport

BUFFERS = "NCCL_RESHARD_PACK_BUFFSIZES"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BUFFERS, ENV_STAGING_MIB, ENV_STEP_BYTES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "step, buffers", [(256 << 20, "268435456:1"), (1 << 30, "1073741824:1"), (8, "2048:1")]
)
def test_m2n_gets_one_buffer_that_holds_a_share_of_any_step(step: int, buffers: str) -> None:
    M2NTransport.configure(dataclasses.replace(M2N, max_local_bytes=step))
    assert os.environ[BUFFERS] == buffers


@pytest.mark.parametrize("given", ["256m", "4k:2, 256M:4", "2147483648:4"])
def test_a_users_own_buffers_are_left_alone_where_a_share_fits(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(BUFFERS, given)
    M2NTransport.configure(M2N)
    assert os.environ[BUFFERS] == given


@pytest.mark.parametrize("given", ["255m:4", "4k", "all", ""])
def test_buffers_that_are_too_small_are_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(BUFFERS, given)
    with pytest.raises(Failure, match=f"{BUFFERS}=.*268435456 bytes.*leave it unset, enlarge it, or lower"):
        M2NTransport.configure(M2N)


def test_memory_set_aside_is_a_share_for_each_step_in_flight_and_one_for_m2n(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert staging_bytes() == 4 * M2N.max_local_bytes
    monkeypatch.setenv(ENV_STEP_BYTES, "1000")
    assert staging_bytes() == 4000
    monkeypatch.setenv(ENV_STAGING_MIB, "3")
    assert staging_bytes() == 3 << 20
