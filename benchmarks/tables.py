"""Parameter tables of public models, as a trainer shards them and as vLLM's workers hold them.

Shapes are computed from the numbers of the models' public configurations. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.kinds import slab_order
from weightsync_engine.layout.tensors import (
    DTYPE_BYTES,
    Expected,
    Mesh,
    Piece,
    Shard,
    SlabTensor,
    SourceParameter,
    WorkerManifest,
)
from weightsync_engine.plan.groups import Worker


@dataclass(frozen=True)
class Parameter:
    """One checkpoint parameter, and how tensor parallelism treats it."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    """The dimension that tensor parallelism cuts; None: replicated."""
    live: str
    """vLLM's tensor that it lands in, with others in order of appearance."""
    layer: int = 0
    expert: int | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with norms on q and k."""

    heads: int
    kv_heads: int
    head_size: int


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention."""

    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    layers: int
    vocabulary: int
    attention: Attention | Latent
    dense: int
    """Width of the dense layers' MLP."""
    dense_layers: int
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    tied: bool = False
    bias: bool = False
    """Of the router: fp32."""

    def parameters(self) -> Iterator[Parameter]:
        h = self.hidden
        yield Parameter("model.embed_tokens.weight", (self.vocabulary, h), 0, "embed")
        for layer in range(self.layers):
            yield from self._layer(layer, f"model.layers.{layer}.")
        last = self.layers - 1
        yield Parameter("model.norm.weight", (h,), None, "norm", last)
        if not self.tied:
            yield Parameter("lm_head.weight", (self.vocabulary, h), 0, "lm_head", last)

    def _layer(self, layer: int, at: str) -> Iterator[Parameter]:
        h, a = self.hidden, self.attention

        def one(name: str, shape: tuple[int, ...], cut: int | None, live: str = "") -> Parameter:
            return Parameter(f"{at}{name}.weight", shape, cut, f"{at}{live or name}", layer)

        yield one("input_layernorm", (h,), None)
        yield one("post_attention_layernorm", (h,), None)
        if isinstance(a, Attention):
            for name, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
                yield one(f"self_attn.{name}_proj", (heads * a.head_size, h), 0, "qkv")
            yield one("self_attn.q_norm", (a.head_size,), None)
            yield one("self_attn.k_norm", (a.head_size,), None)
            yield one("self_attn.o_proj", (h, a.heads * a.head_size), 1)
        else:
            yield one("self_attn.q_a_proj", (a.q_rank, h), None, "qkv_a")
            yield one("self_attn.kv_a_proj_with_mqa", (a.kv_rank + a.rope, h), None, "qkv_a")
            yield one("self_attn.q_a_layernorm", (a.q_rank,), None)
            yield one("self_attn.kv_a_layernorm", (a.kv_rank,), None)
            yield one("self_attn.q_b_proj", (a.heads * (a.nope + a.rope), a.q_rank), 0)
            yield one("self_attn.kv_b_proj", (a.heads * (a.nope + a.value), a.kv_rank), 0)
            yield one("self_attn.o_proj", (h, a.heads * a.value), 1)
        if layer < self.dense_layers:
            yield from self._mlp(layer, f"{at}mlp.", self.dense, None)
            return
        yield one("mlp.gate", (self.experts, h), None)
        if self.bias:
            name = f"{at}mlp.gate.e_score_correction_bias"
            yield Parameter(name, (self.experts,), None, name, layer, None, "float32")
        for expert in range(self.experts):
            yield from self._mlp(layer, f"{at}mlp.experts.{expert}.", self.expert_width, expert)
        if self.shared_width:
            yield from self._mlp(layer, f"{at}mlp.shared_experts.", self.shared_width, None)

    def _mlp(self, layer: int, at: str, width: int, expert: int | None) -> Iterator[Parameter]:
        for name in ("gate", "up"):
            shape = (width, self.hidden)
            yield Parameter(f"{at}{name}_proj.weight", shape, 0, f"{at}gate_up", layer, expert)
        yield Parameter(f"{at}down_proj.weight", (self.hidden, width), 1, f"{at}down", layer, expert)


QWEN3_1_7B = Model("Qwen3-1.7B", 2048, 28, 151936, Attention(16, 8, 128), 6144, 28, tied=True)
QWEN3_8B = Model("Qwen3-8B", 4096, 36, 151936, Attention(32, 8, 128), 12288, 36)
QWEN3_30B_A3B = Model("Qwen3-30B-A3B", 2048, 48, 151936, Attention(32, 4, 128), 0, 0, 128, 768)
DEEPSEEK_V3 = Model(
    "DeepSeek-V3",
    7168,
    61,
    129280,
    Latent(128, 1536, 512, 128, 64, 128),
    18432,
    3,
    256,
    2048,
    2048,
    bias=True,
)


def sources(model: Model, pipeline: int, experts: int, fsdp: int) -> list[SourceParameter]:
    """As `pipeline` stages hold it, each of `experts * fsdp` ranks: dense parameters cut over all of them,
    an expert over the `fsdp` neighbours that own it. Every parameter is cut along its first dimension."""
    each = experts * fsdp
    per_stage = -(-model.layers // pipeline)
    meshes: dict[tuple[int, int], Mesh] = {}
    result: list[SourceParameter] = []
    for p in model.parameters():
        first = p.layer // per_stage * each
        count = each
        if p.expert is not None:
            first, count = first + p.expert * experts // model.experts * fsdp, fsdp
        mesh = meshes.setdefault((first, count), Mesh((count,), tuple(range(first, first + count))))
        result.append(SourceParameter(p.name, p.shape, p.dtype, mesh, (Shard(0),)))
    return result


def workers(model: Model, first_rank: int, servers: int, tensor: int, expert_parallel: bool) -> list[Worker]:
    """`servers` alike, each of `tensor` workers that cut everything but experts, or experts as well."""
    manifests = [_manifest(model, rank, tensor, expert_parallel) for rank in range(tensor)]
    return [
        Worker(first_rank + s * tensor + w, f"server-{s}", manifests[w])
        for s in range(servers)
        for w in range(tensor)
    ]


def _manifest(model: Model, rank: int, tensor: int, expert_parallel: bool) -> WorkerManifest:
    rows: dict[str, int] = {}
    pieces: list[Piece] = []
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    expected: dict[str, Expected] = {}
    for p in model.parameters():
        whole = expert_parallel and p.expert is not None
        if whole and p.expert * tensor // model.experts != rank:  # type: ignore[operator]
            expected[p.name] = Expected(p.shape, p.dtype)
            continue
        box = Box.whole(p.shape)
        if p.cut is not None and not whole:
            start, shape = [0] * len(p.shape), list(p.shape)
            heads = model.attention.kv_heads if isinstance(model.attention, Attention) else tensor
            shards = min(tensor, heads) if ".k_proj" in p.name or ".v_proj" in p.name else tensor
            shape[p.cut] //= shards
            start[p.cut] = shape[p.cut] * (rank * shards // tensor)
            box = Box(tuple(start), tuple(shape))
        # As the shadow has them: of a fused tensor each parameter for itself, unless it is one of experts.
        held = p.live if p.expert is not None else p.name
        at = rows.get(held, 0)
        rows[held] = at + box.shape[0]
        shapes[held] = (rows[held], *box.shape[1:]), p.dtype
        pieces.append(Piece(p.name, box, held, (at, *(0,) * (len(p.shape) - 1))))
        expected[p.name] = Expected(p.shape, p.dtype)
    tensors: dict[str, SlabTensor] = {}
    offset = 0
    for name, shape, dtype in sorted(((n, *s) for n, s in shapes.items()), key=slab_order):
        tensors[name] = SlabTensor(offset, shape, dtype)
        offset += -(-DTYPE_BYTES[dtype] * Box.whole(shape).size // 512) * 512
    return WorkerManifest(expected, tuple(pieces), tensors, {})
