"""vLLM in this process, on the CPU, with its weights kept where they are."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightsync_engine.resolve.experts import KEEPS_WEIGHTS

_ORIGINAL: list[tuple[Any, str, Any]] = []
"""What `vllm_live_weights` changes: where, name, value before."""
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
        import vllm._custom_ops as ops
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        changed = [(ops, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")]
        kinds = (cpu_moe.CPUUnquantizedExperts, cpu_moe.X86CPUUnquantizedExperts)
        changed += [(k, n) for k in kinds for n in ("process_weights_after_loading", "apply", KEEPS_WEIGHTS)]
        _ORIGINAL.extend((where, name, vars(where).get(name)) for where, name in changed)
        import vllm_live_weights

        vllm_live_weights.register()
        yield


@pytest.fixture
def packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build as it is: it packs weights after load."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # once in a process; not in the middle of the test
    for where, name, value in _ORIGINAL:
        if value is not None:
            monkeypatch.setattr(where, name, value)
        elif name in vars(where):
            monkeypatch.delattr(where, name)


@pytest.fixture(scope="session", autouse=True)
def kept_weights() -> Iterator[None]:
    with keep_weights():
        yield


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """vLLM collects garbage at every load, which takes half a second with all of transformers in memory."""
    gc.freeze()
