"""A GPU, or a failure that says so: a test that was not run must not look as if it had passed."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail(
            "tests/gpu needs a CUDA GPU, and torch sees none: run it where there is one", pytrace=False
        )
