"""How the shadow holds live tensors: fused ones by the parameters in them, all others as they are."""

import pytest
import torch

from weightsync_engine.layout.boxes import Box
from weightsync_engine.layout.tensors import WorkerManifest
from weightsync_engine.mover.slab import Slab, plan_slab
from weightsync_engine.resolve.manifest import Resolved, laid_out
from weightsync_engine.resolve.placement import Placed, Placement
from weightsync_engine.vllm.shadow import Flipped, Shadow


def rows(name, live, at, count, width=4, first=0):
    return Placed(name, Box((first, 0), (count, width)), live, (at, 0))


QKV = (rows("q", "qkv", 0, 4), rows("k", "qkv", 4, 2, first=2), rows("v", "qkv", 6, 2))


def test_a_fused_tensor_is_held_by_the_parameters_in_it():
    live = torch.zeros(8, 4)
    pieces, views = laid_out(Placement(placed=QKV), {"qkv": live})
    assert {p.name: (p.tensor, p.box, p.at) for p in pieces} == {
        p.name: (f"{p.name} in qkv", p.box, (0, 0)) for p in QKV
    }
    for number, placed in enumerate(QKV, start=1):
        views[f"{placed.name} in qkv"].fill_(number)
    assert live[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("placed", "shape", "shared"),
    [
        (QKV, (9, 4), ()),
        (QKV[1:], (8, 4), ()),
        (QKV, (8, 5), ()),
        (QKV, (8, 4), ("qkv",)),
        ((*QKV[:2], rows("k", "qkv", 6, 2)), (8, 4), ()),
        ((rows("a", "qkv", 0, 8),), (8, 4), ()),
        (tuple(rows(f"e{i}", "qkv", i, 1) for i in range(9)), (9, 4), ()),
        ((rows("a", "qkv", 0, 2, 2), Placed("b", Box((0, 0), (2, 2)), "qkv", (0, 2))), (2, 4), ()),
        (tuple(Placed(f"e{i}", Box((0, 0), (4, 4)), "qkv", (i, 0, 0)) for i in range(2)), (2, 4, 4), ()),
        ((Placed("q", Box((0,), (4,)), "qkv", (0,)), Placed("k", Box((0,), (4,)), "qkv", (4,))), (8,), ()),
    ],
    ids=[
        "padded", "a gap", "narrower", "written by others", "one name twice", "alone", "many", "columns",
        "experts", "a bias",
    ],
)  # fmt: skip
def test_every_other_tensor_is_held_as_it_is(placed, shape, shared):
    live = torch.zeros(shape)
    pieces, views = laid_out(Placement(placed=placed, shared=frozenset(shared)), {"qkv": live})
    assert [(p.name, p.box, p.tensor, p.at) for p in pieces] == [
        (p.name, p.box, p.live, p.at) for p in placed
    ]
    assert views.keys() == {"qkv"} and views["qkv"].data_ptr() == live.data_ptr()


def test_what_is_to_take_the_place_of_live_tensors_is_laid_out_as_they_are():
    live = torch.zeros(8, 4)
    pieces, views = laid_out(Placement(placed=QKV), {"qkv": live}, whole=True)
    assert [(p.name, p.tensor, p.at) for p in pieces] == [(p.name, "qkv", p.at) for p in QKV]
    assert views["qkv"].data_ptr() == live.data_ptr() and views["qkv"].shape == live.shape


def test_the_flip_of_what_is_held_by_parameters_fills_the_fused_tensor():
    live = torch.zeros(8, 4)
    pieces, views = laid_out(Placement(placed=QKV), {"qkv": live})
    tensors, size = plan_slab((n, tuple(v.shape), "float32") for n, v in views.items())
    shadow = Shadow(Resolved(WorkerManifest({}, pieces, tensors, {}), size, views, ""), Slab.create(size))
    shadow.slab.begin_write()
    for number, piece in enumerate(pieces, start=1):
        shadow.slab.tensor(tensors[piece.tensor]).fill_(number)
    shadow.slab.stamp("step-1", 1)
    assert shadow.flip(Flipped("uid", 1, 1, "step-1")) is None
    assert live[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]
    shadow.slab.close()
