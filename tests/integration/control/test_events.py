"""Events as the API server keeps them: one object for one cause, with a count."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator

import pytest
from tests.cluster import ApiServer

from weightsync_operator.adapters.events import Repeats
from weightsync_operator.adapters.kube import Kube
from weightsync_operator.core.rounds import EventNote

WALL = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
async def kube(api: ApiServer) -> AsyncIterator[Kube]:
    made = await Kube.connect(str(api.kubeconfig))
    yield made
    await made.close()


async def test_ten_equal_failures_in_a_minute_make_one_event_with_a_count(api: ApiServer, kube: Kube) -> None:
    namespace = api.namespace("events")
    repeats = Repeats()

    async def happen(now: float, *words: str) -> None:
        notes = [EventNote("Warning", "RoundFailed", text, "vllm-1/PeerLate") for text in words]
        for due in repeats.due(notes, now):
            await kube.event(namespace, "w", "uid-1", due.note, WALL, "test", count=due.count)

    def kept() -> list[tuple[str, int]]:
        items = api.http.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events").json()["items"]
        return sorted((item["note"], (item.get("series") or {}).get("count", 1)) for item in items)

    for second in range(10):
        await happen(5.0 * second, "rank 3 is late")
    assert kept() == [("rank 3 is late", 1)]
    await happen(60.0)
    assert kept() == [("rank 3 is late", 10)]
    # Figures that differ make another object, and not more than one of them in a minute.
    await happen(70.0, *(f"rank 3 is late in step {step}" for step in range(5)))
    assert kept() == [("rank 3 is late", 10)]
    await happen(125.0)
    assert kept() == [("rank 3 is late", 10), ("rank 3 is late in step 4", 5)]
