"""The slab: where tensors lie, what the stamp says, and what is refused."""

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.layout.tensors import DTYPE_BYTES, SlabTensor
from weightsync_engine.mover.slab import ALIGNMENT, HEADER_BYTES, Slab, SlabError, plan_slab

tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(sorted(DTYPE_BYTES))),
    max_size=8,
)


@pytest.fixture
def slab():
    made = Slab.create(1024)
    yield made
    made.close()


@given(tensors)
def test_planned_tensors_are_aligned_apart_and_hold_what_is_written(wanted):
    places, size = plan_slab((f"t{i}", *t) for i, t in enumerate(wanted))
    slab = Slab.create(size)
    for i, place in enumerate(places.values()):
        assert place.offset % ALIGNMENT == 0
        slab.tensor(place).view(-1).view(torch.uint8).fill_(i + 1) if 0 not in place.shape else None
    for i, place in enumerate(places.values()):
        tensor = slab.tensor(place)
        assert tuple(tensor.shape) == place.shape and tensor.dtype == getattr(torch, place.dtype)
        assert (tensor.reshape(-1).view(torch.uint8) == i + 1).all()
    slab.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([("a", (1,), "int8"), ("a", (1,), "int8")], "given twice"),
        ([("a", (1,), "int4")], "cannot travel"),
        ([("a", (-1,), "int8")], "negative"),
    ],
)
def test_a_slab_that_cannot_be_planned_is_refused_by_name(given, words):
    with pytest.raises(SlabError, match=f"'a'.*{words}"):
        plan_slab(given)


@pytest.mark.parametrize(
    "place",
    [
        SlabTensor(1024, (1,), "int8"),
        SlabTensor(-256, (1,), "int8"),
        SlabTensor(2, (1,), "int32"),
        SlabTensor(0, (3,), "x"),
    ],
)
def test_a_tensor_outside_the_slab_is_refused(slab, place):
    with pytest.raises(SlabError):
        slab.tensor(place)


def test_another_mapping_sees_the_same_bytes_and_the_same_stamp(slab):
    other = Slab.attach(os.dup(slab.fd))
    place = SlabTensor(256, (4,), "float32")
    slab.begin_write()
    slab.tensor(place).copy_(torch.tensor([1.0, 2, 3, 4]))
    slab.stamp("step-1", 7)
    assert other.tensor(place).tolist() == [1, 2, 3, 4]
    assert (other.read_stamp().version, other.read_stamp().sequence) == ("step-1", 7)
    other.close()


def test_there_is_no_stamp_before_the_first_write_nor_during_one(slab):
    assert slab.read_stamp() is None
    slab.begin_write()
    assert slab.read_stamp() is None
    slab.stamp("a", 1)
    assert slab.read_stamp().version == "a"
    slab.begin_write()
    assert slab.read_stamp() is None


def test_a_writer_that_died_halfway_leaves_no_stamp_and_is_no_obstacle(slab):
    slab.begin_write()
    slab.begin_write()
    slab.stamp("b", 2)
    assert slab.read_stamp().version == "b"


def test_a_stamp_without_a_write_is_refused(slab):
    with pytest.raises(SlabError, match="without begin_write"):
        slab.stamp("a", 1)


def test_readers_never_see_half_a_stamp(slab):
    names = {i: chr(ord("a") + i % 26) * (1 + i % 60) for i in range(26 * 60)}
    other = Slab.attach(os.dup(slab.fd))
    done = threading.Event()
    seen, wrong = set(), []

    def read():
        while not done.is_set():
            stamp = other.read_stamp()
            if stamp is not None:
                seen.add(stamp.sequence)
                if stamp.version != names[stamp.sequence]:
                    wrong.append(stamp)

    reader = threading.Thread(target=read)
    reader.start()
    while len(seen) < 3:
        for i in names:
            slab.begin_write()
            slab.stamp(names[i], i)
    done.set()
    reader.join(10)
    assert not wrong
    other.close()


def test_views_outlive_the_slab():
    slab = Slab.create(256)
    view = slab.tensor(SlabTensor(0, (4,), "int32"))
    view.fill_(5)
    slab.close()
    slab.close()
    assert view.tolist() == [5, 5, 5, 5]
    with pytest.raises(SlabError, match="closed"):
        _ = slab.fd


@pytest.mark.parametrize("size", [0, HEADER_BYTES, HEADER_BYTES + 256])
def test_a_descriptor_that_is_no_slab_is_refused(size):
    fd = os.memfd_create("other")
    os.ftruncate(fd, size)
    with pytest.raises(SlabError, match="slab"):
        Slab.attach(fd)
    os.close(fd)


def test_nobody_can_shrink_a_slab_under_its_readers(slab):
    with pytest.raises(PermissionError):
        os.ftruncate(slab.fd, 0)
