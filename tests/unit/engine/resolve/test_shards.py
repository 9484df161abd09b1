"""Which rows of a parameter a tensor-parallel layer keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.resolve.shards import Run, Unresolvable, even, fused, merged, qkv, vocabulary


def test_fewer_kv_heads_than_ranks_keep_heads_whole_on_neighbouring_ranks() -> None:
    # C01
    # hidden 16, head 4, 8 query heads, 2 KV heads, tp 4: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1.
    runs = [qkv(8, 2, 4, 4, size=4, rank=r) for r in range(4)]
    assert [k.start for _, k, _ in runs] == [0, 0, 4, 4]
    assert all(k == Run(k.start, 8, 4, 8) for _, k, _ in runs)
    assert all(v == Run(k.start, 8, 4, 12) for _, k, v in runs)
    assert [q for q, _, _ in runs] == [Run(8 * r, 32, 8, 0) for r in range(4)]


def test_as_many_kv_heads_as_ranks_or_more_are_split_plainly() -> None:
    _, k, v = qkv(8, 8, 4, 4, size=4, rank=3)
    assert k == Run(24, 32, 8, 8)
    assert v == Run(24, 32, 8, 16)


def test_kv_heads_that_neither_divide_nor_are_divided_are_refused_with_both_numbers() -> None:
    with pytest.raises(Unresolvable, match=r"3 KV heads over 4 ranks"):
        qkv(12, 3, 4, 4, size=4, rank=0)
    with pytest.raises(Unresolvable, match=r"6 KV heads do not divide evenly over 4 ranks"):
        qkv(12, 6, 4, 4, size=4, rank=0)


def test_values_may_have_heads_of_another_size_than_keys() -> None:
    q, k, v = qkv(4, 2, 8, 6, size=2, rank=1)
    assert (q, k, v) == (Run(16, 32, 16, 0), Run(8, 16, 8, 16), Run(6, 12, 6, 24))


def test_a_layer_that_is_not_split_inside_a_group_keeps_everything() -> None:
    assert merged([16, 8], size=1, rank=0) == [Run(0, 16, 16, 0), Run(0, 8, 8, 16)]


def test_a_share_that_is_not_even_is_refused_with_both_numbers() -> None:
    with pytest.raises(Unresolvable, match=r"10 elements do not divide evenly over 4 ranks"):
        even(10, 4, 0)
    with pytest.raises(Unresolvable, match=r"rank 4 of 4"):
        even(12, 4, 4)


def test_vocabulary_padding_is_never_part_of_a_run() -> None:
    # 1000 tokens padded to 1024 over 2 ranks.
    assert vocabulary(1000, 0, 512, 512) == Run(0, 1000, 512, 0)
    assert vocabulary(1000, 512, 1000, 512) == Run(512, 1000, 488, 0)
    # A tail rank of padding only.
    assert vocabulary(10, 10, 10, 64).length == 0
    with pytest.raises(Unresolvable):
        vocabulary(10, 0, 11, 64)


def test_parameters_fused_in_the_checkpoint_are_found_behind_each_other() -> None:
    assert fused(merged([8, 8], size=2, rank=1)) == [Run(4, 16, 4, 0), Run(12, 16, 4, 4)]


@given(
    st.sampled_from([(8, 1), (8, 2), (8, 4), (8, 8), (16, 4), (12, 3)]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 8]),
)
def test_every_rank_is_filled_and_every_row_is_held_by_as_many_ranks(
    heads: tuple[int, int], head_size: int, size: int
) -> None:
    query, kv = heads
    held: dict[int, list[int]] = {}
    try:
        shares = [qkv(query, kv, head_size, head_size, size, rank) for rank in range(size)]
    except Unresolvable:
        assert query % size or (kv % size and size % kv)
        return
    for runs in shares:
        at = 0
        for run in runs:
            assert run.at == at, "no gap and no overlap in the live tensor"
            at += run.length
        for row in range(runs[1].start, runs[1].start + runs[1].length):
            held.setdefault(row, []).append(1)
    assert sorted(held) == list(range(kv * head_size))
    assert {len(ranks) for ranks in held.values()} == {max(1, size // kv)}
