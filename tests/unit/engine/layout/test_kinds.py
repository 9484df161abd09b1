"""What counts as one kind, and that a slab holds it in one run of memory."""

import random

import pytest

from weightsync_engine.layout.kinds import kind_of
from weightsync_engine.mover.slab import ALIGNMENT, plan_slab


@pytest.mark.parametrize(
    ("name", "kind", "numbers"),
    [
        ("model.layers.11.mlp.experts.3.up.weight", "model.layers.#.mlp.experts.#.up.weight", (11, 3)),
        ("layers.2.fc1.weight", "layers.#.fc1.weight", (2,)),  # two numbers of one layer would be two kinds
        ("lm_head.weight", "lm_head.weight", ()),
        ("0", "#", (0,)),
        ("", "", ()),
    ],
)
def test_whole_components_that_are_numbers_make_no_other_kind(name, kind, numbers):
    assert kind_of(name) == (kind, numbers)


def test_a_slab_holds_each_kind_in_one_run_in_the_order_of_the_numbers():
    rows = ALIGNMENT // 8
    wanted = [(f"layers.{i}.{what}.weight", (rows, 4), "bfloat16") for i in range(12) for what in ("q", "up")]
    wanted += [("layers.3.up.scale", (3,), "float32"), ("norm.weight", (5,), "bfloat16")]
    random.Random(1).shuffle(wanted)
    places, size = plan_slab(wanted)
    for what in ("q", "up"):
        first = places[f"layers.0.{what}.weight"].offset
        assert [places[f"layers.{i}.{what}.weight"].offset for i in range(12)] == [
            first + i * ALIGNMENT for i in range(12)
        ]
    random.Random(2).shuffle(wanted)
    assert plan_slab(wanted) == (places, size)


def test_one_layer_of_another_shape_or_dtype_does_not_part_the_others():
    def run(odd):
        kinds = dict.fromkeys(range(4), ((64, 4), "bfloat16")) | {1: odd}
        places, _ = plan_slab((f"layers.{i}.w", *kind) for i, kind in kinds.items())
        return [places[f"layers.{i}.w"].offset for i in (0, 2, 3)]

    for odd in (((32, 4), "bfloat16"), ((64, 4), "float32")):
        first, second, third = run(odd)
        assert (second - first, third - second) == (512, 512)
