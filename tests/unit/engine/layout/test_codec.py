"""Manifests survive the wire; equal manifests give equal bytes; tables of large models stay small."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.layout import codec
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import (
    Expected,
    Mesh,
    Piece,
    Replicate,
    Shard,
    SlabTensor,
    SourceParameter,
    StridedShard,
    TrainerManifest,
    Within,
    WorkerManifest,
)

names = st.text("abc.", min_size=1, max_size=6)
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 3)),
    st.builds(StridedShard, st.integers(0, 3), st.integers(1, 4)),
)
meshes = st.builds(Mesh, shapes, shapes)
sources = st.builds(
    SourceParameter, names, shapes, st.sampled_from(["bfloat16", "float32"]), meshes,
    st.lists(placements).map(tuple), st.none() | st.builds(Within, names, shapes, shapes),
    st.sampled_from(["", "", "float32", "float64"]),
)  # fmt: skip
slab = st.dictionaries(names, st.builds(SlabTensor, st.integers(0, 99), shapes, st.just("int8")), max_size=3)
boxes = shapes.map(Box.whole)
pieces = st.lists(st.builds(Piece, names, boxes, names, shapes), max_size=4).map(tuple)
workers = st.builds(
    WorkerManifest,
    st.dictionaries(names, st.builds(Expected, shapes, st.just("float32"))),
    pieces,
    slab,
    st.dictionaries(names, names),
    st.dictionaries(names, names),
    st.dictionaries(names, names),
    st.frozensets(names),
    st.frozensets(names),
)


@given(st.builds(TrainerManifest, st.integers(0, 9), st.lists(sources, max_size=3).map(tuple), slab))
def test_a_trainers_manifest_comes_back_equal(manifest):
    assert codec.decode_trainer(codec.encode_trainer(manifest)) == manifest


@given(workers, st.randoms())
def test_a_workers_manifest_comes_back_equal_and_order_does_not_show(manifest, random):
    data = codec.encode_worker(manifest)
    back = codec.decode_worker(data)
    assert set(back.pieces) == set(manifest.pieces) and back.expected == manifest.expected
    assert (back.aliases, back.fallback) == (manifest.aliases, manifest.fallback)
    assert back.unresolved == manifest.unresolved and back.tensors == manifest.tensors
    assert (back.unused, back.draft) == (manifest.unused, manifest.draft)

    def shuffled(d):
        items = list(d.items())
        random.shuffle(items)
        return dict(items)

    mixed = list(manifest.pieces)
    random.shuffle(mixed)
    other = WorkerManifest(
        shuffled(manifest.expected),
        tuple(mixed),
        shuffled(manifest.tensors),
        manifest.unresolved,
        manifest.aliases,
        manifest.fallback,
        manifest.unused,
        manifest.draft,
    )
    assert codec.encode_worker(other) == data


@given(st.lists(sources, max_size=5, unique_by=lambda s: s.name), st.randoms())
def test_sources_come_back_equal_and_order_does_not_show(table, random):
    data = codec.encode_sources(table)
    assert codec.decode_sources(data) == tuple(sorted(table, key=lambda s: s.name))
    random.shuffle(table)
    assert codec.encode_sources(table) == data


def test_what_sources_have_alike_is_one_object_when_read():
    table = [source(f"w{i}", Mesh((4,), (0, 1, 2, 3))) for i in range(3)]
    read = codec.decode_sources(codec.encode_sources(table))
    assert len({id(s.mesh) for s in read}) == len({id(s.placements) for s in read}) == 1
    assert len({id(s.shape) for s in read}) == 1


# ---- bytes that nobody encoded -----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"expected": 3}', b"\x80\x04\x95pickle"])
@pytest.mark.parametrize("decode", [codec.decode_worker, codec.decode_trainer, codec.decode_sources])
def test_anything_else_is_refused(decode, data):
    with pytest.raises(ValueError):
        decode(data)


def source(name, mesh=None, within=None):
    mesh = mesh or Mesh((2,), (0, 1))
    return SourceParameter(name, (8, 4), "bfloat16", mesh, (Shard(0),), within)


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("name", 0), 99, "name: refers to place 99 in a table of"),
        (("kind", 1), 7, "kind: refers to place 7 in a table of 1"),
        (("tensor", 1), 2, "tensor: refers to place 2 in a table of 2"),
        (("at", 1), 99, "at: refers to place 99"),
        (("kinds", 0, 2), 5, "kinds: refers to place 5 in a table of 1"),
        (("layouts", 0, 1), 50, "layouts: refers to place 50"),
        (("layouts", 0, 2, 0), [1, 2, 3], "a placement of 3 numbers"),
        (("names", "kept", 0), 3, "3 characters of '' are to be kept"),
        (("names", "rest"), [], "beginnings for 0 ends"),
        (("kind",), [0], "columns of unlike lengths"),
        (("name", 1), 0, "twice, or out of order"),
        (("tuples", 0, 0), -1, "greater than or equal to 0"),
        (("tuples", 0, 0), 1.5, "valid integer"),
        (("more",), 1, "not permitted"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused_with_the_place(where, value, words):
    table = json.loads(
        codec.encode_sources([source("b"), source("c", within=Within("t", (9, 8, 4), (3, 0, 0)))])
    )
    *path, last = where
    inner = table
    for step in path:
        inner = inner[step]
    inner[last] = value
    with pytest.raises(ValueError, match=words):
        codec.decode_sources(json.dumps(table).encode())


# ---- size and time -----------------------------------------------------------------------------------------


def deepseek_v3():
    """All 61 layers, 256 experts, stacked: 16 pipeline stages of 64 ranks, experts cut over 16 and then sharded
    over 4, the rest sharded over 64."""
    table = []
    for layer in range(61):
        first = layer * 16 // 61 * 64
        ranks = tuple(range(first, first + 64))
        flat, grid = Mesh((64,), ranks), Mesh((16, 4), ranks)
        at = f"model.layers.{layer}."

        def whole(name, *shape, at=at, flat=flat):
            table.append(SourceParameter(at + name, shape, "bfloat16", flat, (Shard(0),)))

        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            whole(norm, 7168)
        whole("self_attn.q_a_proj.weight", 1536, 7168)
        whole("self_attn.q_a_layernorm.weight", 1536)
        whole("self_attn.q_b_proj.weight", 24576, 1536)
        whole("self_attn.kv_a_proj_with_mqa.weight", 576, 7168)
        whole("self_attn.kv_a_layernorm.weight", 512)
        whole("self_attn.kv_b_proj.weight", 32768, 512)
        whole("self_attn.o_proj.weight", 7168, 16384)
        mlps = [("mlp.", 18432)] if layer < 3 else [("mlp.shared_experts.", 2048)]
        for mlp, size in mlps:
            whole(mlp + "gate_proj.weight", size, 7168)
            whole(mlp + "up_proj.weight", size, 7168)
            whole(mlp + "down_proj.weight", 7168, size)
        if layer < 3:
            continue
        whole("mlp.gate.weight", 256, 7168)
        whole("mlp.gate.e_score_correction_bias", 256)
        experts = at + "mlp.experts."
        for expert in range(256):
            for name, tensor, within, row, shape in (
                ("gate_proj", "gate_up_proj", (256, 4096, 7168), 0, (2048, 7168)),
                ("up_proj", "gate_up_proj", (256, 4096, 7168), 2048, (2048, 7168)),
                ("down_proj", "down_proj", (256, 7168, 2048), 0, (7168, 2048)),
            ):
                region = Within(experts + tensor, within, (expert, row, 0))
                table.append(
                    SourceParameter(
                        f"{experts}{expert}.{name}.weight",
                        shape,
                        "bfloat16",
                        grid,
                        (Shard(0), Shard(1)),
                        region,
                    )
                )
    return table


def one_per_expert(table, ranks=1024):
    """The same parameters, each a tensor of its own, sharded over all ranks."""
    mesh = Mesh((ranks,), tuple(range(ranks)))
    return [SourceParameter(s.name, s.shape, s.dtype, mesh, (Shard(0),)) for s in table]


@pytest.mark.parametrize("of", [list, one_per_expert])
def test_all_of_deepseek_v3_is_a_small_table_that_is_fast_to_read(of):
    table = of(deepseek_v3())
    assert len(table) > 45_000
    started = time.process_time()
    data = codec.encode_sources(table)
    written = time.process_time()
    read = codec.decode_sources(data)
    print(f"{len(data)} bytes, {written - started:.2f} s, {time.process_time() - written:.2f} s")
    assert len(data) < 2_500_000  # 45 000 names alone have 2.5 MB
    assert time.process_time() - started < 4
    assert list(read) == sorted(table, key=lambda s: s.name)


def test_a_worker_of_thousands_of_pieces_is_small_and_fast():
    expected, pieces, slab = {}, [], {}
    for layer in range(58):
        for i, expert in enumerate(range(32, 64)):
            for name, tensor, row, rows in (
                ("gate_proj", "w13_weight", 0, 2048),
                ("up_proj", "w13_weight", 2048, 2048),
                ("down_proj", "w2_weight", 0, 7168),
            ):
                full = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                box = Box.whole((rows, 9216 - rows))
                expected[full] = Expected(box.shape, "bfloat16")
                pieces.append(Piece(full, box, f"model.layers.{layer}.mlp.experts.{tensor}", (i, row, 0)))
        for tensor in ("w13_weight", "w2_weight"):
            slab[f"model.layers.{layer}.mlp.experts.{tensor}"] = SlabTensor(
                layer * 10**9, (32, 4096, 7168), "bfloat16"
            )
    manifest = WorkerManifest(expected, tuple(pieces), slab, {}, {})
    started = time.process_time()
    data = codec.encode_worker(manifest)
    written = time.process_time()
    read = codec.decode_worker(data)
    print(
        f"{len(pieces)} pieces: {len(data)} bytes, {written - started:.2f} s, {time.process_time() - written:.2f} s"
    )
    assert len(data) < 500_000 and time.process_time() - started < 2
    assert read.expected == expected and set(read.pieces) == set(pieces)
