"""What a trainer and a vLLM server hold of a model, from its configuration alone: no weights, no GPU.

The trainer's side is transformers' own model, the servers' side vLLM's own, both on the meta device, and both
go through the same rules that a running trainer and a running server go through.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..layout.tensors import DTYPE_BYTES, WorkerManifest
from ..resolve.draft import draft_of, shapes_of_draft, with_draft
from ..resolve.manifest import resolve
from ..resolve.offline import OfflineError, Parallel, build_worker
from ..trainer.families import family_rules
from ..trainer.naming import Refusal
from ..trainer.precision import Cast, declared_wide, rounded
from .mesh import Region, Tensor


class ModelError(Exception):
    """A model that cannot be planned for; says what is wrong and what to give instead."""


def check_config(folder: Path) -> None:
    """What a server of this configuration would refuse in any case. Raises `ModelError`."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise ModelError(f"{folder / 'config.json'} is no model's configuration: expected an object")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise ModelError(
            f"{folder / 'config.json'} is that of a quantised checkpoint (quantization_config{': ' if method else ''}"
            f"{method}), into which a trainer's weights cannot be written: give the one of the checkpoint that the "
            "trainer began with, or a copy of this file without quantization_config"
        )


@dataclass(frozen=True)
class TrainerModel:
    tensors: tuple[Tensor, ...]
    refused: dict[str, str]
    """Trainer's tensors that no rule can name, each with the reason."""
    refused_bytes: int


def trainer_model(folder: Path) -> TrainerModel:
    """The tensors of transformers' model for a folder with `config.json`. Raises `ModelError`."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as e:
        raise ModelError(
            "transformers is not installed: install it, or give the parameters with --table"
        ) from e
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        build: Any = AutoModelForCausalLM
        if type(config) not in AutoModelForCausalLM._model_mapping:
            build = AutoModelForImageTextToText
        with torch.device("meta"):
            model = build.from_config(config)
    except Exception as e:
        raise ModelError(
            f"transformers cannot build {folder}: {type(e).__name__}: {str(e)[:300]}; give the parameters with --table"
        ) from e
    trained = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    held = {n: p for n, p in (*model.named_parameters(), *model.named_buffers()) if n not in unsaved}
    declared, buffers = declared_wide(model), {name for name, _ in model.named_buffers()}
    rules = family_rules(model, {name: tuple(t.shape) for name, t in held.items()})
    plan = getattr(model, "tp_plan", None) or {}
    tensors: list[Tensor] = []
    refused: dict[str, str] = {}
    lost = 0
    for name, tensor in held.items():
        rule, shape = rules[name], tuple(tensor.shape)
        kind = trained if tensor.dtype.is_floating_point else str(tensor.dtype).removeprefix("torch.")
        if rule is None:
            continue
        if isinstance(rule, Refusal):
            refused[name] = rule.why
            lost += tensor.numel() * DTYPE_BYTES[kind]
            continue
        whole = (0,) * len(shape)
        regions = (
            (Region(rule, whole, shape),)
            if isinstance(rule, str)
            else tuple(Region(part.name, part.at, part.shape) for part in rule)
        )
        wide = tensor.dtype.is_floating_point and declared(name)
        tensors.append(
            Tensor(
                name,
                shape,
                "float32" if wide else kind,
                regions,
                _tensor_parallel(name, len(shape), plan),
                kept=wide or name in buffers,
            )
        )
    return TrainerModel(tuple(tensors), refused, lost)


def _tensor_parallel(name: str, dims: int, plan: Mapping[str, str]) -> int | None:
    """Which dimension transformers' tensor parallel plan cuts."""
    module, _, leaf = name.rpartition(".")
    pattern = ".".join("*" if part.isdigit() else part for part in module.split("."))
    style = plan.get(pattern, plan.get(".".join("*" if p.isdigit() else p for p in name.split(".")), ""))
    if "colwise" in style:
        return 0
    if "rowwise" in style:
        return 1 if dims > 1 and leaf != "bias" and "embed" not in name else (0 if dims > 1 else None)
    return None


def table_model(file: Path) -> TrainerModel:
    """From JSON: `{"name": {"shape": [..], "dtype": "bfloat16"}, ...}`. Raises `ModelError` naming the entry."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"--table {file}: {e}") from e
    if not isinstance(entries, dict) or not entries:
        raise ModelError(
            f'--table {file}: expected an object of {{"name": {{"shape": [..], "dtype": ".."}}}}'
        )
    tensors: list[Tensor] = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ModelError(f'--table {file}: {name!r} has no "shape" of whole numbers')
        kind = entry.get("dtype", "bfloat16")
        if not isinstance(kind, str) or kind not in DTYPE_BYTES:
            raise ModelError(f"--table {file}: {name!r} has dtype {kind!r}; known: {', '.join(DTYPE_BYTES)}")
        tensors.append(Tensor(name, tuple(shape), kind, (Region(name, (0,) * len(shape), tuple(shape)),)))
    return TrainerModel(tuple(tensors), {}, 0)


def server_manifests(
    folder: Path,
    parallel: Parallel,
    dtype: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    speculative: dict[str, Any] | None = None,
) -> tuple[WorkerManifest, ...]:
    """Of each worker of one server, in order of rank. Raises `ModelError`.

    Args:
        shapes: of what the trainer sends.
        speculative: vLLM's `--speculative-config`; its draft model is updated.
    """
    try:
        workers = []
        for rank in range(parallel.workers):
            # vLLM completes what it is given.
            more: dict[str, Any] = {"speculative_config": dict(speculative)} if speculative else {}
            built = build_worker(folder, rank, parallel, dtype=dtype or "auto", **more)
            draft = draft_of(built.draft, built.config)
            if draft is None:
                found = resolve(built.model, None, planned=True, shapes=shapes)
            else:
                own, its = shapes_of_draft(shapes, draft)
                found = resolve(built.model, None, planned=True, shapes=own)
                with built.within():
                    found = with_draft(found, draft, None, planned=True, shapes=its)
            workers.append(found.manifest)
        return tuple(workers)
    except ImportError as e:
        raise ModelError(
            f"vLLM is not installed ({e}): run `weightsync plan` where the servers' image is, or install vllm"
        ) from e
    except OfflineError as e:
        raise ModelError(str(e)) from e


def with_wire_dtypes(
    tensors: tuple[Tensor, ...], manifests: tuple[WorkerManifest, ...]
) -> tuple[Tensor, ...]:
    """Tensors in the dtypes in which the servers hold them: what a trainer sets its wire dtype to. Those that lose bits
    by that which the trainer means to keep say so."""
    live = {name: e.dtype for m in manifests for name, e in m.expected.items()}
    live |= {alias: live[name] for m in manifests for alias, name in m.aliases.items() if name in live}
    wires = [next((live[r.name] for r in t.regions if r.name in live), t.dtype) for t in tensors]
    wide = rounded(
        Cast(t.name, math.prod(t.shape), t.dtype, wire, t.kept)
        for t, wire in zip(tensors, wires, strict=True)
    )
    return tuple(
        replace(t, dtype=wire, rounded_from=wide.get(t.name, ""))
        for t, wire in zip(tensors, wires, strict=True)
    )
