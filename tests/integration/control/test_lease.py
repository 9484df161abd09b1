"""One operator works at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.cluster import ApiServer

from weightsync_operator.adapters.kube import Kube
from weightsync_operator.adapters.lease import Lease


@pytest.fixture
async def kube(api: ApiServer) -> AsyncIterator[Kube]:
    made = await Kube.connect(str(api.kubeconfig))
    yield made
    await made.close()


async def test_a_second_operator_waits_until_the_first_lets_go(api: ApiServer, kube: Kube) -> None:
    namespace = api.namespace("lease-1")
    first, second = (Lease(kube, namespace, name, seconds=30) for name in ("first", "second"))
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    done, _ = await asyncio.wait({waiting}, timeout=2.5)
    assert not done
    await first.release()
    await asyncio.wait_for(waiting, 10)
    assert (first.held, second.held) == (False, True)


async def test_the_lease_of_a_dead_operator_runs_out(api: ApiServer, kube: Kube) -> None:
    namespace = api.namespace("lease-2")
    first, second = (Lease(kube, namespace, name, seconds=2) for name in ("first", "second"))
    await first.acquire()  # and never renews
    await asyncio.wait_for(second.acquire(), 20)
    # The first one, should it come back to life, finds out and stops.
    await asyncio.wait_for(first.keep(), 10)
    assert not first.held


async def test_a_holder_that_cannot_renew_gives_up_before_others_may_take_over(
    api: ApiServer, kube: Kube
) -> None:
    namespace = api.namespace("lease-3")
    lease = Lease(kube, namespace, "only", seconds=3)
    await lease.acquire()
    lease._path = lease._path.replace(namespace, "no-such-namespace")
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(lease.keep(), 10)
    assert not lease.held
    assert asyncio.get_running_loop().time() - began < 3
