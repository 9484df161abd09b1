"""C16: dtype or device differs between the sides. What a trainer's tensors become on their way into live ones, row by
row: by the trainer's own rules, through `merge`, to the plan and its words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import DTYPE_BYTES, Expected, Piece, SlabTensor, WorkerManifest
from weightsync_engine.mover.epoch import judge_plans
from weightsync_engine.plan.compile import compile_plan
from weightsync_engine.plan.groups import Worker
from weightsync_engine.plan.plan import Plan
from weightsync_engine.plan.steps import PlanError
from weightsync_engine.trainer.handle import PublishError
from weightsync_engine.trainer.merge import merge
from weightsync_engine.trainer.precision import Cast, loses, rounded
from weightsync_engine.trainer.publisher import Publisher, warn_of_rounding
from weightsync_engine.trainer.sources import Held, Sources
from weightsync_engine.transport.choose import choose
from weightsync_engine.transport.failure import Failure

BIAS = "gate.e_score_correction_bias"


class Model(nn.Module):
    """Master weights in fp32 under FSDP that computes in bf16; beside them what it computes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8, bias=False)
        self.down_proj = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8, dtype=torch.bfloat16)
        self.gate = nn.Module()
        self.gate.register_buffer("e_score_correction_bias", torch.arange(8, dtype=torch.float32))
        self.register_buffer("steps", torch.arange(2))


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        made, mesh = Model(), init_device_mesh("cpu", (1,))
        for part in (made.q_proj, made.down_proj):
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        yield made
    finally:
        dist.destroy_process_group()


def server(name: str, shape: tuple[int, ...], dtype: str, **more: Any) -> WorkerManifest:
    tensors = {"live": SlabTensor(0, shape, dtype)}
    pieces = (Piece(name, Box.whole(shape), "live", (0,) * len(shape)),)
    return WorkerManifest({name: Expected(shape, dtype)}, pieces, tensors, **({"unresolved": {}} | more))


def planned(sources: Sources, name: str, live: str, **more: Any) -> Plan:
    """The plan for one parameter, as a server holds it. Raises `PlanError`."""
    held = [h.describe() for h in sources.held()]
    (source,) = (s for s in merge([held]) if s.name == name)
    plan = compile_plan([source], [Worker(1, "s", server(name, source.shape, live, **more))], 1)
    # Never a byte copy of another width.
    (step,) = plan.steps
    elements = int(torch.tensor(source.shape).prod())
    assert (step.dtype, plan.bytes_received) == (live, elements * DTYPE_BYTES[live])
    return plan


@dataclass(frozen=True)
class Row:
    name: str
    live: str
    says: str = ""
    """What is told of it, or why it is refused."""
    dtype: Any = None
    """Given to `Publisher`."""
    refused: str = ""
    more: dict[str, Any] = field(default_factory=dict)


LOADED = "its layer keeps weights in the form of Fp8PerChannel"
ROWS = {
    "norm bf16, live bf16": Row("norm.weight", "bfloat16"),
    "fp32 master of bf16, live bf16": Row("q_proj.weight", "bfloat16"),
    "bias fp32, live fp32, though all else travels as bf16": Row(BIAS, "float32"),
    "bias fp32, live bf16, and nobody said that it may be cast": Row(
        BIAS, "bfloat16", "set the wire dtype to bfloat16", refused="DtypeDiffers"
    ),
    "bias fp32, live bf16, cast by name": Row(
        BIAS, "bfloat16", "1 rounded on the way, with fewer bits in the servers than the trainer computes with: "
        f"{BIAS} (float32 to bfloat16)", {BIAS: torch.bfloat16},
    ),
    "bias fp32, live bf16, cast with all else": Row(BIAS, "bfloat16", f"{BIAS} (float32 to bfloat16)", torch.bfloat16),
    "bias fp32, live fp32, cast with all else": Row(
        BIAS, "float32", "set the wire dtype to float32", torch.bfloat16, "DtypeDiffers"
    ),
    "down_proj bf16, live fp8 that vLLM makes": Row(
        "down_proj.weight", "bfloat16", more={"fallback": {"down_proj.weight": LOADED}}
    ),
    "down_proj bf16, live fp8 of a quantised checkpoint": Row(
        "down_proj.weight", "bfloat16", "quantised in the checkpoint", refused="Unresolved",
        more={"unresolved": {"down_proj.weight": "its layer keeps weights as quantised in the checkpoint"}},
    ),
    "down_proj bf16, live fp8 taken for its equal": Row(
        "down_proj.weight", "float8_e4m3fn", "sends bfloat16", refused="DtypeDiffers"
    ),
    "down_proj bf16, live packed bytes": Row("down_proj.weight", "uint8", "sends bfloat16", refused="DtypeDiffers"),
    "int64 buffer": Row("steps", "int64"),
    "int64 buffer, live int32": Row("steps", "int32", "sends int64", refused="DtypeDiffers"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_what_a_tensor_becomes_on_its_way(model: Model, row: Row) -> None:
    sources = Sources(model, dtype=row.dtype)
    if row.refused:
        with pytest.raises(PlanError) as caught:
            planned(sources, row.name, row.live, **row.more)
        assert caught.value.problem.reason == row.refused
        assert row.says in caught.value.problem.message and row.name in caught.value.problem.message
        return
    plan = planned(sources, row.name, row.live, **row.more)
    assert plan.fallback == row.more.get("fallback", {})
    assert plan.summary.rounded == len(plan.rounded) == bool(row.says)
    assert row.says in plan.summary.rounding and bool(plan.summary.rounding) == bool(row.says)


def test_a_tensor_without_values_is_refused_by_name() -> None:
    with pytest.raises(PublishError, match="'w' is on the meta device"):
        Sources([("w", torch.empty(2, device="meta"))]).held()


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_one_tensor_in_host_memory_is_brought_to_the_gpu_by_the_snapshots_copy() -> None:
    embed, rest = torch.ones(2), torch.ones(2).as_subclass(OnGPU)
    held = [Held(n, t, t.dtype, True, t.dtype, False) for n, t in (("embed", embed), ("q", rest))]
    held[1].tensor.detach = lambda: rest  # type: ignore[method-assign]
    assert Publisher._device(None, held) == torch.device("cuda", 0)


def test_one_rank_in_host_memory_is_refused_for_all_and_named() -> None:
    words = [{"runtime": {"transport": "M2NTransport"}, "digest": "d"} for _ in range(4)]
    words[2] = {"runtime": {"transport": choose("auto", "cpu", 2).__name__}, "digest": "d"}
    found = judge_plans(words)
    assert found is not None and (found.reason, found.rank) == ("RuntimeDiffers", 2)
    assert "rank 2 runs with transport GlooTransport, rank 0 with M2NTransport" in found.message
    with pytest.raises(
        Failure, match="rank 2 holds its weights in host memory: transport 'nccl_m2n' needs a GPU"
    ):
        choose("nccl_m2n", "cpu", 2)


def cast(name: str, computed: str, wire: str = "bfloat16", elements: int = 100, kept: bool = False) -> Cast:
    return Cast(name, elements, computed, wire, kept)


def test_master_weights_are_nobodys_loss_and_what_is_wider_than_most_is_told() -> None:
    masters = [cast(f"w{i}", "float32") for i in range(3)]
    assert rounded(masters) == {}
    assert rounded([*masters, cast("buffer", "float32", kept=True)]) == {"buffer": "float32"}
    assert rounded([cast("w", "bfloat16"), cast("router", "float32", elements=1)]) == {"router": "float32"}
    assert rounded([cast("w", "bfloat16"), cast("router", "float32", "float32", elements=1)]) == {}
    assert rounded([cast("w", "float32", "float16"), cast("x", "float64", "float16", 1)]) == {"x": "float64"}
    assert rounded([]) == {} == rounded([cast("steps", "int64", "int64", kept=True)])


@pytest.mark.parametrize(
    ("have", "wire", "lost"),
    [
        ("float32", "bfloat16", True), ("float32", "float16", True), ("float64", "float32", True),
        ("bfloat16", "float16", True), ("float16", "bfloat16", True), ("bfloat16", "float8_e4m3fn", True),
        ("bfloat16", "float32", False), ("float16", "float32", False), ("bfloat16", "bfloat16", False),
        ("int64", "int32", False), ("", "bfloat16", False),
    ],
)  # fmt: skip
def test_bits_are_lost_where_range_or_digits_are_fewer(have: str, wire: str, lost: bool) -> None:
    assert loses(have, wire) == lost


class Declares(nn.Module):
    """As models of transformers do, whatever the rest is in."""

    _keep_in_fp32_modules_strict = ("gate.e_score_correction_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2, 2, bias=False)
        self.gate = nn.Module()
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(2))
        self.gate.e_score_correction_bias_scale = nn.Parameter(torch.zeros(2))


def test_what_the_model_declares_to_stay_wide_is_told_by_whole_components_of_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = [h.describe() for h in Sources(Declares(), dtype=torch.bfloat16).held()]
    sources = merge([held])
    assert {s.name: s.rounded_from for s in sources if s.rounded_from} == {BIAS: "float32"}
    warn_of_rounding(sources)
    (record,) = caplog.records
    assert (
        f"1 rounded on the way, with fewer bits in the servers than the trainer computes with: {BIAS} "
        in record.message
    )
    warn_of_rounding(merge([[h.describe() for h in Sources(Declares()).held()]]))
    assert len(caplog.records) == 1
