"""vLLM in this process, on the CPU, with its weights kept where they are."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

LIVE_WEIGHTS = Path(__file__).parents[1] / "vllm_live_weights"


@contextlib.contextmanager
def keep_weights() -> Iterator[None]:
    """vLLM as the tests need it, outside of pytest too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_PLUGINS": "weightsync,vllm_live_weights", "TQDM_DISABLE": "1",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        patch.syspath_prepend(str(LIVE_WEIGHTS))
        import vllm_live_weights

        vllm_live_weights.register()
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_weights() -> Iterator[None]:
    with keep_weights():
        yield


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """vLLM collects garbage at every load, which takes half a second with all of transformers in memory."""
    gc.freeze()
