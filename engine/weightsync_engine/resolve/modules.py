"""Reads a live vLLM model: what each module says about its own parameters.

Everything comes from the module that owns the parameter: its loader (which must be one whose arithmetic is
known here, bound to that very module), its own tensor-parallel size and rank, its partition sizes. Nothing is
inferred from the name of a model or from shapes alone; shapes only confirm.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..layout.tensors import DTYPE_BYTES
from .experts import describe_experts, other_form
from .names import NameRules
from .placement import LiveTensor
from .shards import Rerun, Unresolvable, even, merged, qkv, vocabulary

EMPTY = (
    "its live tensor is empty: this build of vLLM keeps a packed copy of the weights in place of them, which cannot be "
    "updated (vLLM's own reload leaves that of a tied head as it was); serve on a GPU, or with a build that keeps "
    "weights as they are"
)
_QUANTISED = ("packed_dim", "packed_factor", "marlin_tile_size")
_TRANSFORMED = ("needs_scalar_to_array", "is_sharded_weight", "is_transposed", "use_bitsandbytes_4bit")
_DERIVED = ("W_UK_T_dcp_qrep", "_cpu_unpacked_conv_weight")
_DERIVED_COPY = "its layer computed {} from it after load, which would keep the old values"
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def name_rules(model: nn.Module) -> NameRules:
    """What the model declares about names: `packed_modules_mapping` and `hf_to_vllm_mapper`."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    packed = {
        key: tuple(value) for key, value in dict(getattr(model, "packed_modules_mapping", None) or {}).items()
    }
    if mapper is None:
        return NameRules(packed)
    stacked: dict[str, dict[Any, str]] = {}
    for old, (new, shard) in dict(getattr(mapper, "orig_to_new_stacked", {})).items():
        for one in shard if isinstance(shard, (list, tuple)) else (shard,):
            stacked.setdefault(new.strip("."), {})[one] = old.strip(".")
    for key, shards in stacked.items():
        order = ("q", "k", "v") if set(shards) == {"q", "k", "v"} else tuple(range(len(shards)))
        if set(order) == set(shards):
            packed.setdefault(key, tuple(shards[shard] for shard in order))
    plain = dataclasses.replace(mapper, orig_to_new_stacked={})

    def kept(rules: Any) -> dict[str, str]:
        return {old: new for old, new in dict(rules or {}).items() if new is not None}

    return NameRules(
        packed,
        plain.map_name,
        kept(getattr(mapper, "orig_to_new_prefix", None)),
        kept(getattr(mapper, "orig_to_new_substr", None)),
        kept(getattr(mapper, "orig_to_new_suffix", None)),
    )


def read_model(model: nn.Module, planned: bool = False) -> Iterator[tuple[LiveTensor, torch.Tensor]]:
    """Every parameter of the model with its description, tied ones under each of their names.

    A description that cannot be written directly carries its problem; nothing raises.

    Args:
        model: the worker's part of the model.
        planned: the model is one of shapes only, on the meta device: what a server does with its weights
            after load is taken to keep them as they are.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    paths: dict[tuple[int, str], list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                paths.setdefault((id(module), leaf), []).append((f"{path}.{leaf}" if path else leaf, module))
    derived, problems, sources = _derived(model)
    problems |= _permuted(model)
    elsewhere = {id(m._parameters[leaf]) for (_, leaf), ((_, m), *_) in paths.items() if not _is_moe(m)}
    for (_, leaf), named in paths.items():
        (name, module), *others = named
        parameter = module._parameters[leaf]
        assert parameter is not None
        if id(parameter) in derived:
            continue  # A view of a parameter, written with it.
        if _is_moe(module) and (id(parameter) in elsewhere or getattr(module, "local_num_experts", 1) == 0):
            continue  # The router's own, lent to its experts; or a worker without experts.
        data = parameter.data
        base = LiveTensor(
            name=name,
            shape=tuple(data.shape),
            dtype=dtype_name(data.dtype),
            storage=_storage(data, name),
        )
        if isinstance(module, VocabParallelEmbedding):
            names = [base, *(dataclasses.replace(base, name=other) for other, _ in others)]
        else:
            names = [dataclasses.replace(base, also=tuple(other for other, _ in others))]
        for one in names:
            try:
                if id(parameter) in problems:
                    raise problems[id(parameter)]
                yield _describe(one, module, leaf, parameter, planned), data
            except Unresolvable as e:
                source = sources.get(id(parameter))
                yield dataclasses.replace(one, problem=str(e), rerun=e.rerun, source=source), data
    yield from _buffers(model)


def _buffers(model: nn.Module) -> Iterator[tuple[LiveTensor, torch.Tensor]]:
    """Persistent buffers: those that are in the checkpoint too were loaded from it."""
    for path, module in model.named_modules():
        for leaf, data in module._buffers.items():
            if data is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{path}.{leaf}" if path else leaf
            dtype = dtype_name(data.dtype)
            problem = ""
            if dtype not in DTYPE_BYTES or not data.is_contiguous() or data.numel() == 0:
                problem = (
                    f"a buffer of shape {list(data.shape)}, strides {data.stride()} and {dtype} cannot travel"
                )
            yield (
                LiveTensor(
                    name, tuple(data.shape), dtype, _storage(data, name),
                    must_compare=True, group=_group(module), optional=True, problem=problem,
                ),
                data,
            )  # fmt: skip


def _storage(data: torch.Tensor, name: str) -> Any:
    """Equal exactly for the same memory, shape and strides."""
    if data.numel() == 0:
        return name
    memory = data.untyped_storage()._cdata if data.is_meta else data.data_ptr()
    return (data.device, memory, data.storage_offset(), tuple(data.shape), data.stride())


def _derived(model: nn.Module) -> tuple[set[int], dict[int, Unresolvable], dict[int, Any]]:
    """What attention modules keep of their `kv_b_proj` (absorbed MLA): parameters that are views of its weight,
    by id; weights, by id, of which something is a copy, with the reason not to write them; and of the copies,
    by id, the storage of the weight."""
    views: set[int] = set()
    problems: dict[int, Unresolvable] = {}
    sources: dict[int, Any] = {}
    for path, module in model.named_modules():
        source = getattr(getattr(module, "kv_b_proj", None), "weight", None)
        if not isinstance(source, torch.Tensor):
            continue
        for name, tensor in {**module._parameters, **module._buffers, **vars(module)}.items():
            if not name.startswith("W_") or not isinstance(tensor, torch.Tensor):
                continue
            if _same_memory(tensor, source):
                views.add(id(tensor))
            else:
                problems[id(source)] = problems[id(tensor)] = Unresolvable(
                    _DERIVED_COPY.format(name), Rerun((path,))
                )
                sources[id(tensor)] = _storage(source.data, f"{path}.kv_b_proj.weight")
    for path, module in model.named_modules():
        # Attention sinks: some kernels keep them in another dtype.
        sinks = module._parameters.get("sinks")
        for below, part in () if sinks is None else module.named_modules(prefix=path):
            kept = getattr(getattr(part, "impl", None), "sinks", None)
            if sinks is not None and isinstance(kept, torch.Tensor) and not _same_memory(kept, sinks):
                problems[id(sinks)] = Unresolvable(
                    _DERIVED_COPY.format(f"its kernel's sinks of {dtype_name(kept.dtype)}"), Rerun((below,))
                )
    return views, problems, sources


def _permuted(model: nn.Module) -> dict[int, Unresolvable]:
    """Parameters, by id, of models that declare that they permute q and k as they load them (Llama 4). Without this
    the values would tell, where there are values."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    return {
        id(parameter): Unresolvable(
            "its live tensor holds q and k, whose rows the model permutes as it loads them", Rerun()
        )
        for part in model.modules()
        if callable(getattr(type(part), "permute_qk_weight_for_rotary", None))
        for module in part.modules()
        if isinstance(module, QKVParallelLinear)
        for parameter in module.parameters(recurse=False)
    }


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata or (
        not one.is_meta and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _is_moe(module: nn.Module) -> bool:
    """Experts and what runs them; a router's gate is a linear layer."""
    from vllm.model_executor.layers.linear import LinearBase

    return not isinstance(module, LinearBase) and any(
        "fused_moe" in kind.__module__ or kind.__name__ == "FusedMoE" for kind in type(module).__mro__
    )


def parts_of_others(model: nn.Module) -> list[str]:
    """Paths of modules below which other workers hold what this one does not: experts and pipeline stages."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, PPMissingLayer) or _is_moe(module)
    ]


def _describe(
    base: LiveTensor, module: nn.Module, leaf: str, parameter: nn.Parameter, planned: bool
) -> LiveTensor:
    data, path = parameter.data, base.name.rpartition(".")[0]
    if data.is_meta and not planned:
        raise Unresolvable("its live tensor has no memory (meta device)")
    if data.numel() == 0:
        raise Unresolvable(EMPTY)
    if "lora" in type(module).__module__.split("."):
        raise Unresolvable("its layer is wrapped for LoRA adapters")
    method = getattr(module, "quant_method", None)
    if method is not None and not _is_moe(module) and type(method).__name__ not in _PLAIN_METHODS:
        raise other_form("layer", method, path)
    if not data.is_contiguous():
        raise Unresolvable(
            f"its live tensor is not contiguous (shape {list(data.shape)}, strides {data.stride()})"
        )
    if base.dtype not in DTYPE_BYTES:
        raise Unresolvable(f"weights of dtype {base.dtype} cannot travel")
    if _is_moe(module):
        return describe_experts(base, module, leaf, parameter, planned)
    if any(getattr(parameter, a, None) is not None for a in _QUANTISED) or any(
        bool(getattr(parameter, a, False)) for a in _TRANSFORMED
    ):
        raise Unresolvable("its loader packs or transposes values")
    derived = next((a for a in _DERIVED if getattr(module, a, None) is not None), None)
    if derived:
        raise Unresolvable(_DERIVED_COPY.format(derived), Rerun((path,)))
    if leaf == "weight" and not planned and not _forward_reads(module, data):
        raise Unresolvable(
            "its layer computes with a packed copy of it, made after load, which would keep the old values"
        )
    return _sharded(base, module, leaf, parameter)


def _forward_reads(module: nn.Module, weight: torch.Tensor) -> bool:
    """On the CPU, vLLM may replace a layer's product by one with a packed copy that ignores the weight it is
    given. Told by asking for the product of ones with a weight of zeros."""
    product = getattr(module, "cpu_linear", None)
    if product is None or weight.ndim != 2 or weight.device.type != "cpu":
        return True
    with torch.inference_mode():
        ones = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        return not bool(product(ones, torch.zeros_like(weight), None).any()) or not bool(weight.any())


def _sharded(base: LiveTensor, module: Any, leaf: str, parameter: nn.Parameter) -> LiveTensor:
    """The runs of a parameter, by the loader that its module (an nn.Module) gave it."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loader = getattr(parameter, "weight_loader", None)
    if loader is None or loader is default_weight_loader:
        if isinstance(module, (linear.LinearBase, VocabParallelEmbedding)) and leaf in ("weight", "bias"):
            raise Unresolvable("its loader is gone, so nothing tells which part of the parameter it is")
        return dataclasses.replace(base, must_compare=not _is_plain(module), group=_group(module))
    owner, function = _unbound(loader)
    if (
        owner is not module
        and isinstance(owner, nn.Module)
        and any(p is parameter for p in owner._parameters.values())
    ):
        return dataclasses.replace(base, borrowed=True)

    def by(cls: type, *loaders: str) -> bool:
        return isinstance(module, cls) and function in [getattr(cls, n) for n in loaders if hasattr(cls, n)]

    both = ("weight_loader", "weight_loader_v2")
    dim: int | None
    if by(linear.QKVParallelLinear, *both):
        dim = _dim(parameter, "output_dim")
        runs = list(
            qkv(
                module.total_num_heads,
                module.total_num_kv_heads,
                module.head_size,
                getattr(module, "v_head_size", module.head_size),
                module.tp_size,
                module.tp_rank,
            )
        )
    elif by(linear.MergedColumnParallelLinear, *both):
        dim = _dim(parameter, "output_dim")
        runs = merged(list(module.output_sizes), module.tp_size, module.tp_rank)
    elif by(linear.ColumnParallelLinear, *both):
        dim = _dim(parameter, "output_dim")
        runs = [even(module.output_size, module.tp_size, module.tp_rank)]
    elif by(linear.RowParallelLinear, *both):
        dim = _dim(parameter, "input_dim")
        runs = [even(module.input_size, module.tp_size, module.tp_rank)] if dim is not None else []
    elif by(linear.ReplicatedLinear, *both):
        dim, runs = None, []
    elif by(VocabParallelEmbedding, "weight_loader"):
        dim = _dim(parameter, "output_dim")
        at = module.shard_indices
        if dim is not None:
            if at.num_added_elements_padded:
                raise Unresolvable("its vocabulary has rows added for adapters")
            rows = base.shape[dim]
            runs = [vocabulary(module.org_vocab_size, at.org_vocab_start_index, at.org_vocab_end_index, rows)]
            if owner is module:
                return dataclasses.replace(base, runs=tuple(runs), dim=dim)
        runs = []
    else:
        raise Unresolvable(f"its loader is not known to copy plainly: {_title(function)}", Rerun())

    if owner is not module:
        raise Unresolvable(f"its loader {_title(function)} belongs to another module", Rerun())
    if dim is None:
        # Without a cut dimension these loaders give every worker the whole.
        return base
    rank = getattr(parameter, "tp_rank", module.tp_rank)
    if rank != module.tp_rank:
        raise Unresolvable(
            f"the parameter says rank {rank} of its layer's group, the layer says {module.tp_rank}"
        )
    held = sum(run.length for run in runs)
    if base.shape[dim] != held:
        whole = list(base.shape)
        whole[dim] = sum(run.whole for run in runs)
        raise Unresolvable(
            f"its live shape {list(base.shape)} is not the share of {list(whole)} that rank "
            f"{module.tp_rank} of {module.tp_size} should hold ({held} in dimension {dim})"
        )
    return dataclasses.replace(base, runs=tuple(runs), dim=dim)


def _group(module: nn.Module) -> tuple[int, int]:
    """Size and rank of the tensor-parallel group of a module's own linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    groups = {(int(m.tp_size), int(m.tp_rank)) for m in module.children() if isinstance(m, LinearBase)}
    cut = [group for group in groups if group[0] > 1]
    return cut[0] if len(cut) == 1 else (1, 0)


def _dim(parameter: nn.Parameter, attribute: str) -> int | None:
    dim = getattr(parameter, attribute, None)
    return dim if isinstance(dim, int) and 0 <= dim < parameter.data.ndim else None


def _unbound(loader: Callable[..., Any]) -> tuple[Any, Any]:
    """(the object it is bound to, the function). Wrappers and partials stay what they are: unknown."""
    if isinstance(loader, functools.partial):
        return None, loader
    return (loader.__self__, loader.__func__) if inspect.ismethod(loader) else (None, loader)


def _title(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _is_plain(module: nn.Module) -> bool:
    """Modules whose parameters vLLM loads by plain copy, and that have no way of holding a part of one."""
    kind = type(module)
    return kind.__module__ in ("vllm.model_executor.layers.layernorm", "torch.nn.modules.normalization")
