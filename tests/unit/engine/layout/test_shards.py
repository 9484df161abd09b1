"""Shards of a mesh equal torch's own."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.shards import LayoutError, shard_boxes
from weightsync_engine.layout.tensors import Mesh, Replicate, Shard, SourceParameter, StridedShard


def source(shape, mesh, placements, ranks=None):
    ranks = tuple(range(math.prod(mesh))) if ranks is None else ranks
    return SourceParameter("w", shape, "float32", Mesh(mesh, ranks), placements)


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    one = st.one_of(st.just(Replicate()), st.builds(Shard, st.integers(0, len(shape) - 1)))
    return source(shape, mesh, tuple(draw(st.tuples(*[one] * len(mesh)))))


@given(layouts())
@settings(deadline=None)
def test_boxes_equal_those_of_dtensor(layout):
    placements = [TorchShard(p.dim) if isinstance(p, Shard) else TorchReplicate() for p in layout.placements]
    boxes = shard_boxes(layout)
    for rank in layout.mesh.ranks:
        place, coordinate = rank, []
        for size in reversed(layout.mesh.shape):
            coordinate.insert(0, place % size)
            place //= size
        shape, offset = _compute_local_shape_and_global_offset(
            layout.shape, layout.mesh.shape, lambda d, c=coordinate: c[d], placements
        )
        expected = Box(tuple(offset), tuple(shape)) if math.prod(shape) else None
        assert boxes[rank] == expected


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [(10, 4, [3, 3, 3, 1]), (5, 4, [2, 2, 1, 0]), (2, 4, [1, 1, 0, 0]), (12, 4, [3, 3, 3, 3])],
)
def test_uneven_rows_leave_short_and_empty_tails(rows, ranks, expected):
    boxes = shard_boxes(source((rows, 4), (ranks,), (Shard(0),)))
    assert [b.shape[0] if (b := boxes[r]) else 0 for r in range(ranks)] == expected


def test_fsdp_over_tensor_parallelism_cuts_the_inner_shard_first():
    boxes = shard_boxes(source((8, 2), (2, 2), (StridedShard(0, 2), Shard(0))))
    # Ranks are (fsdp, tp): tp 0 has rows 0-3, of which fsdp 0 keeps rows 0-1.
    assert {r: b.start[0] for r, b in boxes.items() if b} == {0: 0, 1: 4, 2: 2, 3: 6}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (source((4,), (3,), (Shard(0),), ranks=(0, 1)), "does not hold 2 ranks"),
        (source((4,), (2,), (Shard(0),), ranks=(1, 1)), "not distinct"),
        (source((4,), (2,), ()), "0 placements"),
        (source((4,), (2,), (Shard(1),)), "no such dimension"),
        (source((4,), (2, 2), (StridedShard(0, 3), Shard(0))), "asks for 3 shards"),
    ],
)
def test_a_layout_that_means_nothing_is_refused_by_name(layout, words):
    with pytest.raises(LayoutError, match=f"'w'.*{words}"):
        shard_boxes(layout)
