"""Reads the experts of a live mixture-of-experts layer: which checkpoint parameters its stacked tensors hold.

The layout of a live expert tensor is a property of the kernel that computes with it, not of its shape: some
keep the halves of `w13` swapped, some permute blocks. Only kernels that are known to compute from the weights
as they were loaded are accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..layout.boxes import Box
from .placement import LiveTensor, Slot
from .shards import Rerun, Run, Unresolvable, even

KEEPS_WEIGHTS = "weightsync_keeps_weights"
"""Attribute of an experts kernel (a class) from elsewhere that says: it computes from `w13` and `w2` as they
were loaded, and keeps nothing made of them."""
_KERNELS = {
    "vllm.model_executor.layers.fused_moe.experts.triton_moe": ("TritonExperts",),
    "vllm.model_executor.layers.fused_moe.experts.fused_batched_moe": ("BatchedTritonExperts",),
}


def other_form(what: str, method: Any, path: str) -> Unresolvable:
    """Of weights that a quantisation method keeps as no trainer has them. vLLM's online methods quantise what is
    loaded, each time that it is loaded; of others the checkpoint is quantised itself."""
    kept = f"its {what} keep{'s' if what == 'layer' else ''} weights in the form of {type(method).__name__}"
    if getattr(method, "uses_meta_device", False):
        return Unresolvable(kept, Rerun((path,)))
    return Unresolvable(
        f"{kept}, which are quantised in the checkpoint, and a trainer's are not; serve the checkpoint that the "
        "trainer began with, quantised by vLLM as it loads it (--quantization fp8_per_channel, for one) or not at all"
    )


def describe_experts(
    base: LiveTensor, module: Any, leaf: str, parameter: nn.Parameter, planned: bool
) -> LiveTensor:
    """The slots of an expert tensor of vLLM's `RoutedExperts`. Raises `Unresolvable`."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    kind = type(module)
    if not isinstance(module, RoutedExperts):
        raise Unresolvable(f"its experts are kept by {kind.__name__}, whose layout is not known")
    method = module.quant_method
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        raise other_form("experts", method, base.name.rpartition(".")[0])
    config = module.moe_config
    parallel = config.moe_parallel_config
    if parallel.enable_eplb:
        raise Unresolvable("expert load balancing moves experts between workers")
    if config.num_experts != config.num_logical_experts:
        raise Unresolvable("some experts are held twice, for load balancing")
    if module.expert_map_manager.num_fused_shared_experts:
        raise Unresolvable("its shared experts are fused with the routed ones")
    if not planned:
        _check_kernel(method, base.name.rpartition(".")[0])
    hidden, inner = config.hidden_dim, config.intermediate_size_per_partition
    for padded, plain in (
        (hidden, config.hidden_dim_unpadded),
        (inner, config.intermediate_size_per_partition_unpadded),
    ):
        if plain is not None and padded != plain:
            raise Unresolvable(f"its kernel pads experts from {plain} to {padded}")
    # What is above decides whether loading is all that vLLM does to them; what follows, how it loads.
    if (kind.load_weights, kind.weight_loader) != (RoutedExperts.load_weights, RoutedExperts.weight_loader):
        raise Unresolvable(
            f"its experts are loaded by {kind.__name__}, which is not known to copy plainly", Rerun()
        )
    if getattr(parameter, "weight_loader", None) != module.weight_loader:
        raise Unresolvable("its loader is not the one of its experts", Rerun())
    local = {e: int(module._map_global_expert_id_to_local_expert_id(e)) for e in range(config.num_experts)}
    held = {e: at for e, at in local.items() if at >= 0}
    if sorted(held.values()) != list(range(module.local_num_experts)):
        raise Unresolvable(f"the map of experts names {len(held)} of {module.local_num_experts} local ones")
    stem, _, own = base.name.rpartition(".")[0].rpartition(".")
    if own != "routed_experts" or stem.rpartition(".")[2] != "experts":
        raise Unresolvable(f"its experts are not where vLLM's loader looks for them: {base.name}")
    share = even(inner * parallel.tp_size, parallel.tp_size, parallel.tp_rank)
    gate, up, down = module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name
    count = config.num_experts

    shapes = {
        "w13_weight": (len(held), inner * (2 if up else 1), hidden),
        "w2_weight": (len(held), hidden, inner),
        "w13_bias": (len(held), inner * (2 if up else 1)),
        "w2_bias": (len(held), hidden),
    }
    if leaf not in shapes:
        raise Unresolvable(f"{leaf} of a mixture of experts is not known")
    if base.shape != shapes[leaf]:
        raise Unresolvable(
            f"its live shape {list(base.shape)} is not {list(shapes[leaf])}, which {len(held)} local experts "
            "have as they are loaded"
        )
    ending = leaf.rpartition("_")[2]
    rest = (hidden,) if leaf == "w13_weight" else ()
    ways: list[tuple[Slot, ...]] = []
    if leaf in ("w13_weight", "w13_bias"):
        # gate and up, one after the other in the live tensor, each cut over its rows
        runs = [(gate, dataclasses.replace(share, at=0))]
        if up:
            runs.append((up, dataclasses.replace(share, at=inner)))
        ways.append(
            tuple(
                Slot(f"{stem}.{e}.{name}.{ending}", (run.whole, *rest), *_rows(run, rest, (at,)))
                for e, at in held.items()
                for name, run in runs
            )
        )
        joined = {("gate_proj", "up_proj"): "gate_up_proj", ("w1", "w3"): "w13"}.get((gate, up), "")
        joined = joined if up else gate
        if joined:
            # The same two side by side in the checkpoint as well, for each expert or for all of them stacked.
            both = [dataclasses.replace(r, start=r.start + i * r.whole) for i, (_, r) in enumerate(runs)]
            whole = (sum(r.whole for _, r in runs), *rest)
            if up:
                ways.append(
                    tuple(
                        Slot(f"{stem}.{e}.{joined}.{ending}", whole, *_rows(run, rest, (at,)))
                        for e, at in held.items()
                        for run in both
                    )
                )
            if ending == "weight" and not module.is_fused_checkpoint_transposed:
                ways.append(
                    tuple(
                        Slot(
                            f"{stem}.{joined}",
                            (count, *whole),
                            Box((first, run.start, 0), (length, run.length, *rest)),
                            (at, run.at, 0),
                        )
                        for first, at, length in _blocks(held)
                        for run in both
                    )
                )
    elif leaf == "w2_weight":
        ways.append(
            tuple(
                Slot(
                    f"{stem}.{e}.{down}.weight",
                    (hidden, share.whole),
                    Box((0, share.start), (hidden, share.length)),
                    (at, 0, 0),
                )
                for e, at in held.items()
            )
        )
        if not module.is_fused_checkpoint_transposed:
            ways.append(
                tuple(
                    Slot(
                        f"{stem}.{down}",
                        (count, hidden, share.whole),
                        Box((first, 0, share.start), (length, hidden, share.length)),
                        (at, 0, 0),
                    )
                    for first, at, length in _blocks(held)
                )
            )
    else:
        # Every worker holds the whole of it.
        ways.append(
            tuple(
                Slot(f"{stem}.{e}.{down}.bias", (hidden,), Box((0,), (hidden,)), (at, 0))
                for e, at in held.items()
            )
        )
    return dataclasses.replace(base, slots=tuple(ways))


def _rows(run: Run, rest: Sequence[int], leading: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """The box in the checkpoint's parameter, and where it begins in the live tensor."""
    zeros = (0,) * len(rest)
    return Box((run.start, *zeros), (run.length, *rest)), (*leading, run.at, *zeros)


def _blocks(held: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring experts that are neighbours in the live tensor too: (expert, place, length)."""
    first, place, length = -1, -1, 0
    for expert, at in sorted(held.items()):
        if length and (expert, at) == (first + length, place + length):
            length += 1
            continue
        if length:
            yield first, place, length
        first, place, length = expert, at, 1
    if length:
        yield first, place, length


def _check_kernel(method: Any, path: str) -> None:
    """Refuse a kernel that is not known to compute from the weights as they were loaded. `path`: of the module
    whose experts they are."""
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is None:
        raise Unresolvable("nothing tells which kernel computes with its experts")
    kind = type(experts)
    if vars(kind).get(KEEPS_WEIGHTS) is True or kind.__name__ in _KERNELS.get(kind.__module__, ()):
        return
    if "cpu_moe" in kind.__module__:
        raise Unresolvable(
            "this build of vLLM keeps the weights of experts in a packed form, which cannot be updated (vLLM's own "
            "reload makes another one of the same weights); serve on a GPU"
        )
    raise Unresolvable(
        f"its experts are computed by {kind.__name__}, which is not known to keep weights as they are loaded; "
        "start vLLM with --moe-backend triton",
        Rerun((path,)),
    )
