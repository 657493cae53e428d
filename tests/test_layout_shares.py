"""Shares: contiguous, complete, and as even, or as near to their weights, as whole numbers allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.shares import share, span


@given(total=st.integers(0, 5000), parts=st.integers(1, 16))
def test_shares_are_complete_and_differ_by_at_most_one(total, parts):
    sizes = share(total, parts)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    covered = [i for part in range(parts) for i in range(*span(sizes, part).indices(total))]
    assert covered == list(range(total))


@given(total=st.integers(0, 5000), weights=st.lists(st.floats(0.1, 50), min_size=1, max_size=8))
def test_weighted_shares_are_complete_and_give_everyone_something(total, weights):
    sizes = share(total, len(weights), tuple(weights))
    assert sum(sizes) == total and min(sizes) >= (1 if total >= len(weights) else 0)


@pytest.mark.parametrize(
    ("total", "weights", "sizes"),
    [(57, (24, 16), (34, 23)), (10, (3, 1), (8, 2)), (3, (100, 1, 1), (1, 1, 1)), (1, (1, 5), (0, 1))],
)
def test_weighted_shares_are_in_proportion(total, weights, sizes):
    assert share(total, len(weights), weights) == sizes
