"""Which rows of a parameter are compared with the checkpoint."""

from hypothesis import given
from hypothesis import strategies as st

from weightsync_engine.resolve.checkpoint import SAMPLE, sample_rows


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_rows_are_few_inside_and_the_same_each_time(start: int, count: int) -> None:
    rows = sample_rows(start, start + count)
    assert rows == sorted(set(rows)) == sample_rows(start, start + count)
    assert min(SAMPLE - 4, count) <= len(rows) <= SAMPLE
    assert rows[0] == start and rows[-1] == start + count - 1


@given(st.integers(1, 128), st.sampled_from([4, 32, 64, 80, 96, 128, 256]))
def test_a_permutation_within_heads_moves_one_of_them(heads: int, size: int) -> None:
    """As Llama 4's: the halves of each head's rows are interleaved, and its first and last row stay."""
    permuted = [h * size + (i % 2) * (size // 2) + i // 2 for h in range(heads) for i in range(size)]
    assert any(permuted[row] != row for row in sample_rows(0, heads * size))
