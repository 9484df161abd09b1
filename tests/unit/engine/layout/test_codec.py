"""Manifests survive the wire; equal manifests give equal bytes."""

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
    SourceParameter, names, shapes, st.just("bfloat16"), meshes, st.lists(placements).map(tuple)
)
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
)


@given(st.builds(TrainerManifest, st.integers(0, 9), st.lists(sources, max_size=3).map(tuple), slab))
def test_a_trainers_manifest_comes_back_equal(manifest):
    assert codec.decode_trainer(codec.encode_trainer(manifest)) == manifest


@given(workers, st.randoms())
def test_a_workers_manifest_comes_back_equal_and_order_does_not_show(manifest, random):
    data = codec.encode_worker(manifest)
    back = codec.decode_worker(data)
    assert set(back.pieces) == set(manifest.pieces) and back.expected == manifest.expected
    assert back.aliases == manifest.aliases and back.tensors == manifest.tensors

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
    )
    assert codec.encode_worker(other) == data


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"expected": 3}', b"\x80\x04\x95pickle"])
def test_anything_else_is_refused(data):
    with pytest.raises(ValueError):
        codec.decode_worker(data)
