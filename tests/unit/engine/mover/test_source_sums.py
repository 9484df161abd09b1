"""Digests of a trainer rank's shards: per checkpoint parameter, whatever tensor it lies in."""

import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync_engine.digest import MODULUS, box_digest
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import Mesh, Replicate, Shard, SourceParameter, Within
from weightsync_engine.mover.verify import of_sources


def cut(tensor, box):
    for dim, (start, extent) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, extent)
    return tensor


def sums_of(rank, sources, whole):
    """As the rank's mover has it: its shards only."""
    shards = {}
    for source in sources:
        box = shard_boxes(source).get(rank)
        if box is not None:
            shards[source.tensor] = cut(whole[source.tensor], box).contiguous()
    return of_sources(sources, rank, lambda part: cut(shards[part.tensor], part.box)).sums()


@st.composite
def stacked(draw):
    """Experts [E, 2I, H] on a mesh of two dimensions, cut along any two, and the parameters in them."""
    experts, half, width = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    shape = (experts, 2 * half, width)
    mesh = Mesh((2, 3), tuple(draw(st.permutations(range(6)))))
    dims = draw(st.permutations(range(3)))
    placements = tuple(draw(st.sampled_from([Shard(d), Replicate()])) for d in dims[:2])
    parts = [(f"{e}.{n}", (e, i * half, 0)) for e in range(experts) for i, n in enumerate(("gate", "up"))]
    return [
        SourceParameter(name, (half, width), "float32", mesh, placements, Within("t", shape, at))
        for name, at in parts
    ]


@given(stacked())
@settings(deadline=None)
def test_shards_of_a_stacked_tensor_add_up_to_each_parameter_in_it(sources):
    whole = {"t": torch.randn(sources[0].tensor_shape)}
    per_rank = [sums_of(rank, sources, whole) for rank in range(6)]
    copies = 1
    for placement, size in zip(sources[0].placements, sources[0].mesh.shape, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    for source in sources:
        value = cut(whole["t"], source.region).reshape(source.shape)
        one = box_digest(value, Box.whole(source.shape), source.shape)
        total = sum(sums.get(source.name, 0) for sums in per_rank) % MODULUS
        assert total == copies * one % MODULUS


def test_a_rank_says_nothing_of_parameters_that_it_does_not_hold():
    mesh = Mesh((2,), (0, 1))
    sources = [
        SourceParameter(f"{e}", (3,), "float32", mesh, (Shard(0),), Within("t", (4, 3), (e, 0)))
        for e in range(4)
    ]
    whole = {"t": torch.randn(4, 3)}
    assert set(sums_of(0, sources, whole)) == {"0", "1"}
    assert set(sums_of(1, sources, whole)) == {"2", "3"}
    assert sums_of(2, sources, whole) == {}


def test_tens_of_thousands_of_small_parameters_take_seconds_on_a_mesh_of_a_thousand():
    mesh = Mesh((16, 64), tuple(range(1024)))
    placements, shape = (Replicate(), Shard(1)), (45_000, 64, 4)
    sources = [
        SourceParameter(f"{e}", (64, 4), "bfloat16", mesh, placements, Within("t", shape, (e, 0, 0)))
        for e in range(45_000)
    ]
    shard = torch.randn(45_000, 1, 4).to(torch.bfloat16)
    started = time.process_time()
    sums = of_sources(sources, 70, lambda part: cut(shard, part.box)).sums()
    spent = time.process_time() - started
    print(f"{spent:.2f} s, {spent / 45_000 * 1e6:.0f} us each")
    assert len(sums) == 45_000 and spent < 10
    assert sums["9"] == box_digest(shard[9], Box((6, 0), (1, 4)), (64, 4))
