"""The digest: equal to a plain reference, additive over boxes, and different for any difference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weightsync_engine.digest import _CHUNK, _SMALL, MODULUS, Digests, box_digest
from weightsync_engine.layout.boxes import Box

shapes = hnp.array_shapes(min_dims=0, max_dims=4, max_side=6)
arrays = shapes.flatmap(lambda s: hnp.arrays(st.sampled_from([np.int8, np.int16, np.int32, np.int64]), s))


LANES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)


def reference(array, box, shape):
    """One element after the other, in Python's own integers."""

    def finish(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
        return z ^ z >> 31

    total = 0
    for at in np.ndindex(*box.shape):
        index = 0
        for i, start, n in zip(at, box.start, shape, strict=True):
            index = index * n + start + i
        bits, width = int(array[at]) % (1 << 8 * array.itemsize), min(array.itemsize, 2)
        for unit in range(array.itemsize // width):
            place = index * (array.itemsize // width) + unit
            key = finish(place // 4 * 0x9E3779B97F4A7C15 % MODULUS) | 1
            total += ((bits >> 16 * unit) % (1 << 8 * width) + 1) * key * LANES[place % 4]
    return total % MODULUS


def digest(array, box=None):
    box = box or Box.whole(array.shape)
    return box_digest(torch.from_numpy(np.ascontiguousarray(array)).reshape(box.shape), box, array.shape)


@st.composite
def arrays_and_cuts(draw):
    array = draw(arrays.filter(lambda a: a.ndim > 0))
    axis = draw(st.integers(0, array.ndim - 1))
    return array, axis, draw(st.integers(0, array.shape[axis]))


@given(arrays)
@settings(deadline=None)
def test_it_equals_the_reference(array):
    assert digest(array) == reference(array, Box.whole(array.shape), array.shape)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float64])
def test_what_it_reads_stays_as_it_is(dtype):
    tensor = torch.arange(6).to(dtype)
    box_digest(tensor, Box.whole((6,)), (6,))
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]


@given(arrays_and_cuts())
@settings(deadline=None)
def test_disjoint_boxes_add_up_along_any_axis(case):
    array, axis, cut = case
    total = 0
    for a, b in ((0, cut), (cut, array.shape[axis])):
        box = Box(
            tuple(a if d == axis else 0 for d in range(array.ndim)),
            tuple(b - a if d == axis else n for d, n in enumerate(array.shape)),
        )
        part = np.take(array, range(a, b), axis)
        value = box_digest(torch.from_numpy(part), box, array.shape)
        assert value == reference(part, box, array.shape)
        total += value
    assert total % MODULUS == digest(array)


@given(arrays.filter(lambda a: a.size > 0), st.data())
@settings(deadline=None)
def test_any_flipped_bit_shows(array, data):
    changed = array.copy().reshape(-1)
    at, bit = data.draw(st.integers(0, array.size - 1)), data.draw(st.integers(0, 8 * array.itemsize - 1))
    unsigned = changed.view(f"u{array.itemsize}")
    unsigned[at] ^= np.array(1 << bit, unsigned.dtype)
    assert digest(changed.reshape(array.shape)) != digest(array)


@given(arrays.filter(lambda a: a.size > 1), st.data())
@settings(deadline=None)
def test_any_two_unlike_elements_that_change_places_show(array, data):
    flat = array.copy().reshape(-1)
    i, j = data.draw(st.integers(0, array.size - 1)), data.draw(st.integers(0, array.size - 1))
    before = flat.copy()
    flat[[i, j]] = flat[[j, i]]
    assert (digest(flat.reshape(array.shape)) == digest(array)) == bool((flat == before).all())


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "bool"]
)
def test_every_dtype_counts_by_its_bits(dtype):
    tensor = torch.tensor([0, 1, 1, 0, 1], dtype=torch.float32).to(getattr(torch, dtype))
    bits = tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    assert box_digest(tensor, Box.whole((5,)), (5,)) == reference(bits.numpy(), Box.whole((5,)), (5,))


def test_minus_zero_differs_from_zero():
    assert digest(np.zeros(1, np.float32).view(np.int32)) != digest((-np.zeros(1, np.float32)).view(np.int32))


def test_long_tensors_are_summed_over_many_chunks():
    array = np.arange(3 * _CHUNK + 5, dtype=np.int32)
    middle = _CHUNK + 3
    halves = (
        digest(array[:middle].copy(), None),
        box_digest(torch.from_numpy(array[middle:]), Box((middle,), (array.size - middle,)), array.shape),
    )
    first = box_digest(torch.from_numpy(array[:middle]), Box((0,), (middle,)), array.shape)
    assert halves[0] == first
    assert (first + halves[1]) % MODULUS == digest(array)


def test_a_strided_region_counts_like_its_copy():
    whole = torch.arange(48, dtype=torch.int16).reshape(2, 6, 4)
    region = whole[:, 2:5]
    box = Box((0, 3, 0), (2, 3, 4))
    assert box_digest(region, box, (2, 9, 4)) == box_digest(region.contiguous(), box, (2, 9, 4))


def test_a_tensor_that_is_not_the_box_is_refused():
    with pytest.raises(ValueError, match="does not hold"):
        box_digest(torch.zeros(3), Box((0,), (4,)), (8,))


@st.composite
def many_boxes(draw):
    """Arrays of several widths, and a box of each: whole, cut in any dimension, or empty."""
    held = []
    for array in draw(st.lists(arrays, max_size=12)):
        start = tuple(draw(st.integers(0, n)) for n in array.shape)
        extent = tuple(draw(st.integers(0, n - a)) for n, a in zip(array.shape, start, strict=True))
        held.append((array, Box(start, extent)))
    return held


@given(many_boxes())
@settings(deadline=None)
def test_many_at_once_are_what_each_is_alone(held):
    items = []
    for array, box in held:
        cut = array[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        items.append((torch.from_numpy(np.asarray(cut)), box, array.shape))
    assert Digests(items).sums() == [box_digest(*item) for item in items]


def test_large_and_small_boxes_mix_and_fill_more_than_a_chunk():
    sizes = [_SMALL + 5, 1, _CHUNK + 1, *[700] * 120, 3]
    tensors = [torch.arange(n, dtype=torch.int16).reshape(n) * 7 for n in sizes]
    items = [(t, Box((2,), (len(t),)), (len(t) + 2,)) for t in tensors]
    assert Digests(iter(items)).sums() == [box_digest(*item) for item in items]


def test_boxes_are_worked_out_once_and_summed_as_they_are_each_time():
    whole = torch.zeros(6, 4, dtype=torch.bfloat16)
    held = [(whole[1:3], Box((1, 0), (2, 4)), (6, 4)), (whole[:, 2:], Box((0, 2), (6, 2)), (6, 4))]
    digests = Digests(held)
    for value in (1.0, 2.0):
        whole.fill_(value)
        assert digests.sums() == [box_digest(*one) for one in held]


def test_one_of_many_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="does not hold"):
        Digests([(torch.zeros(3), Box((0,), (4,)), (8,))])
