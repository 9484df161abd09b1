"""Copies of many tensors: right for every mixture of dtypes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.transport.copies import copy_all, same_bits

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
