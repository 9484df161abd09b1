"""A trainer described in a few words holds each tensor as such trainers do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync_engine.cli.main import parse_server
from weightsync_engine.cli.mesh import MeshError, Region, Tensor, parse_mesh, sources
from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import shard_boxes
from weightsync_engine.layout.tensors import Replicate, Shard, StridedShard


def tensor(name, shape, tensor_parallel=None, regions=None):
    regions = regions or (Region(name, (0,) * len(shape), shape),)
    return Tensor(name, shape, "bfloat16", regions, tensor_parallel)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected NAME=SIZE"),
        ("8", "such as fsdp=8"),
        ("zero=8", "a name of pp, replicate"),
        ("fsdp=0", "at least 1"),
        ("fsdp=x", "whole number"),
        ("fsdp=\u00b2", "whole number"),
        ("fsdp=-4", "whole number"),
        ("fsdp=" + "9" * 5000, "whole number"),
        ("fsdp=4,", "expected NAME=SIZE"),
        ("FSDP=4", "a name of pp, replicate"),
        ("fsdp=2,fsdp=2", "given twice"),
        ("tp=2,fsdp=4", "innermost"),
        ("fsdp=100000", "at most 65536"),
    ],
)
def test_a_mesh_that_means_nothing_is_refused_with_what_to_write(text, words):
    with pytest.raises(MeshError, match=words):
        parse_mesh(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp=0",
        "tp=2,tp=4",
        "ep=2",
        "ep,ep",
        "gpus=8",
        "tp=\u00b2",
        "tp=8,count=1000000",
        "tp=" + "9" * 5000,
    ],
)
def test_a_server_that_means_nothing_is_refused(text):
    with pytest.raises(MeshError):
        parse_server(text)


def test_servers_are_described_by_their_sizes():
    spec = parse_server("tp=8,ep,count=4")
    assert (spec.tensor, spec.pipeline, spec.experts, spec.count) == (8, 1, True, 4)


def test_fsdp_over_tensor_parallel_on_one_dimension_is_strided_as_in_torch():
    (q, o, norm) = sources(
        [tensor("q", (64, 8), 0), tensor("o", (8, 64), 1), tensor("norm", (64,))], parse_mesh("fsdp=4,tp=2")
    )
    assert q.placements == (StridedShard(0, 2), Shard(0))
    assert o.placements == (Shard(0), Shard(1))
    assert norm.placements == (Shard(0), Replicate())


def test_layers_belong_to_pipeline_stages_and_experts_to_their_owners():
    named = [
        tensor("model.embed_tokens.weight", (16, 4)),
        *(tensor(f"model.layers.{i}.mlp.experts.{e}.w", (8, 4)) for i in range(4) for e in range(4)),
        tensor("lm_head.weight", (16, 4)),
    ]
    by_name = {s.name: s for s in sources(named, parse_mesh("pp=2,ep=2,fsdp=2"))}
    assert by_name["model.embed_tokens.weight"].mesh.ranks == (0, 1, 2, 3)
    assert by_name["lm_head.weight"].mesh.ranks == (4, 5, 6, 7)
    assert by_name["model.layers.0.mlp.experts.0.w"].mesh.ranks == (0, 1)
    assert by_name["model.layers.0.mlp.experts.3.w"].mesh.ranks == (2, 3)
    assert by_name["model.layers.3.mlp.experts.1.w"].mesh.ranks == (4, 5)


def test_stacked_experts_are_cut_by_expert_and_then_by_fsdp():
    regions = tuple(Region(f"e.{e}", (e, 0, 0), (8, 4)) for e in range(4))
    found = sources([tensor("mlp.experts.gate_up", (4, 8, 4), regions=regions)], parse_mesh("ep=2,fsdp=2"))
    assert [s.name for s in found] == ["e.0", "e.1", "e.2", "e.3"]
    assert shard_boxes(found[3])[3] == Box((2, 4, 0), (2, 4, 4))


def test_experts_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(MeshError, match=r"ep=3.*4 experts"):
        sources([tensor("experts.w", (4, 8, 4))], parse_mesh("ep=3"))


@given(
    st.lists(
        st.tuples(st.sampled_from(["pp", "replicate", "ep", "fsdp"]), st.integers(1, 3)),
        min_size=1, unique_by=lambda d: d[0],
    ),
    st.integers(1, 2),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_every_element_of_every_tensor_is_held(dims, tp):
    mesh = parse_mesh(",".join(f"{n}={s}" for n, s in dims) + (f",tp={tp}" if tp > 1 else ""))
    named = [tensor(f"layers.{i}.q", (7, 4), 0) for i in range(5)] + [tensor("experts.w", (6, 5, 4))]
    for source in sources(named, mesh):
        boxes = {b for b in shard_boxes(source).values() if b is not None}
        assert sum(b.size for b in boxes) == Box.whole(source.shape).size
        assert max(source.mesh.ranks) < mesh.ranks
