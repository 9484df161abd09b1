"""Copies of many tensors: right for every mixture of dtypes and strides."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.transport.copies import Copies, copy_all, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pairs = st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans()), max_size=8)


@given(pairs)
def test_every_target_holds_its_source_cast(kinds):
    sources = []
    for i, (_, dtype, turned) in enumerate(kinds):
        whole = torch.arange(12, dtype=torch.float32).add(i).to(dtype).view(3, 4)
        sources.append(whole.T if turned else whole)
    targets = [torch.zeros(s.shape, dtype=into) for s, (into, _, _) in zip(sources, kinds, strict=True)]
    copy_all(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.to(target.dtype))


@given(st.data())
def test_a_region_is_copied_alone_wherever_it_begins_and_ends(data):
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 12]), min_size=1, max_size=3))
    extent = [data.draw(st.integers(1, n)) for n in shape]

    def region_of(whole):
        for dim, (n, e) in enumerate(zip(shape, extent, strict=True)):
            whole = whole.narrow(dim, data.draw(st.integers(0, n - e)), e)
        return whole

    size = math.prod(shape)
    source = region_of(torch.arange(size).to(torch.uint8).to(dtype).view(shape))
    into = torch.full((size,), 99).to(dtype).view(shape)
    target = region_of(into)
    wanted = into.clone().as_strided(target.shape, target.stride(), target.storage_offset())
    wanted.copy_(source)
    Copies([target], [source]).run()
    assert same_bits(into, wanted.as_strided(shape, into.stride(), 0))


def test_bits_are_compared_and_not_values():
    a = torch.tensor([float("nan"), 0.0, 1.0], dtype=torch.bfloat16)
    assert same_bits(a, a.clone(), chunk=2)
    assert not same_bits(a, torch.tensor([float("nan"), -0.0, 1.0], dtype=torch.bfloat16), chunk=2)
    assert same_bits(torch.ones(4, 4).T, torch.ones(4, 4), chunk=3)
    assert not same_bits(torch.tensor([True, False]), torch.tensor([True, True]))
    assert same_bits(torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("elements", [64, 1 << 20])
def test_every_bit_of_nans_is_kept(elements):
    bits = torch.arange(elements, dtype=torch.int32).to(torch.int16)
    target = torch.zeros(elements, dtype=torch.bfloat16)
    copy_all([target], [bits.view(torch.bfloat16)])
    assert torch.equal(target.view(torch.int16), bits)
