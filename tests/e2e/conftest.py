"""The cluster that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster import Cluster, obtain


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster is used and left running; one that had to be made is deleted at the end."""
    found = obtain()
    try:
        yield found
    finally:
        if found.created:
            found.delete()
