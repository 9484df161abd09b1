"""Tests that need a GPU. `make test` does not collect them; without a GPU they fail and say so."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Movers import what the tests import: the checkout need not be installed.
    root = str(config.rootpath)
    paths = [
        root,
        os.path.join(root, "engine"),
        os.path.join(root, "operator"),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)


@pytest.fixture(autouse=True, scope="session")
def a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail(
            "tests/gpu need a CUDA device and a torch built for it: run them on a machine with a GPU",
            pytrace=False,
        )


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
