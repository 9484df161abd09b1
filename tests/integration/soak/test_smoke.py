"""A short soak: `make soak` is the long one."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.soak.run import soak


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="weightsync-soak-"))  # short: paths of unix sockets are
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.timeout(900)
def test_ten_rounds_under_faults_leave_no_wrong_answer_and_nothing_behind(folder: Path) -> None:
    figures = soak(folder, rounds=10, seed=4, servers=1)
    assert figures.rounds == 10 and figures.troubled
