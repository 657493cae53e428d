"""Shares are contiguous and complete, and as even, or as close to their weights, as whole numbers allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.layout import slice_of, split_sizes, stage_blocks


@given(total=st.integers(0, 5000), parts=st.integers(1, 16))
def test_shares_are_complete_and_differ_by_at_most_one(total, parts):
    sizes = split_sizes(total, parts)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    covered = [i for part in range(parts) for i in range(*slice_of(sizes, part).indices(total))]
    assert covered == list(range(total))


@given(total=st.integers(0, 5000), weights=st.lists(st.floats(0.1, 50), min_size=1, max_size=8))
def test_weighted_shares_are_complete_and_give_everyone_something(total, weights):
    sizes = split_sizes(total, len(weights), tuple(weights))
    assert sum(sizes) == total and min(sizes) >= (1 if total >= len(weights) else 0)


@pytest.mark.parametrize(
    ("total", "weights", "sizes"),
    [
        (57, (24, 16), (34, 23)),
        (10, (3, 1), (8, 2)),
        (3, (100, 1, 1), (1, 1, 1)),
        (1, (1, 5), (0, 1)),
        (5, (1, 0), (5, 0)),
        (2, (9, 0, 1), (1, 0, 1)),
    ],
)
def test_weighted_shares_are_in_proportion(total, weights, sizes):
    assert split_sizes(total, len(weights), weights) == sizes


@given(
    count=st.integers(1, 90),
    shares=st.lists(st.floats(0.2, 5), min_size=1, max_size=8),
)
def test_an_image_passes_every_block_once_in_order(count, shares):
    stages = stage_blocks(count, tuple(shares[:count]))
    assert [block for blocks in stages for block in blocks] == list(range(count))
    assert all(map(len, stages))


def test_equal_stages_leave_the_surplus_to_the_last_and_shares_size_them():
    assert stage_blocks(57, (1.0,) * 4) == (range(14), range(14, 28), range(28, 42), range(42, 57))
    assert [len(blocks) for blocks in stage_blocks(57, (24.0, 16.0))] == [34, 23]
