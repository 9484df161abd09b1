"""The cluster that the end-to-end tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from examples.demo.fleet import ROOT
from tests.cluster import Cluster, obtain
from tests.e2e import results
from tests.e2e.world import World, fresh_or_kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cells of the matrix that an earlier session has passed are not run again, if it is to be gone on with."""
    passed = results.passed(ROOT / "build" / "e2e")
    done = [item for item in items if item.get_closest_marker("faults") and _cell(item) in passed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]


def _cell(item: pytest.Item) -> str:
    call = getattr(item, "callspec", None)
    return call.params["run"].id if call is not None and "run" in call.params else ""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster is used and left running; one that had to be made is deleted at the end.

    Two nodes besides the control plane, so that one can fail. WEIGHTSYNC_KEEP_FLEET leaves it running in any case.
    """
    found = obtain(workers=2)
    try:
        yield found
    finally:
        if found.created and not os.environ.get("WEIGHTSYNC_KEEP_FLEET"):
            found.delete()


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> Iterator[World]:
    """A fleet to which faults are done, the operator on its first node."""
    if cluster.kind_of == "named":
        pytest.skip("the nodes of a named cluster are not containers of ours: nothing can be done to them")
    with fresh_or_kept(cluster, ROOT / "build" / "e2e" / "faults") as world:
        yield world
