"""Shares: contiguous, complete, and as even, or as near to their weights, as whole numbers allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.layout import slice_of, split_blocks, split_sizes


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
    double=st.integers(1, 30),
    single=st.integers(1, 60),
    shares=st.lists(st.floats(0.2, 5), min_size=1, max_size=8),
)
def test_an_image_passes_every_block_once_in_order(double, single, shares):
    shares = tuple(shares[: double + single])
    stages = split_blocks(double, single, shares)
    passed = [block for chunks in zip(*stages, strict=True) for blocks in chunks for block in blocks]
    assert passed == list(range(double + single))
    assert all(len(blocks) for stage in stages for blocks in stage)


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_stages_of_flux_dev_are_even_in_blocks_and_in_weights(count):
    stages = split_blocks(19, 38, (1.0,) * count)
    blocks = [sum(map(len, stage)) for stage in stages]
    # Weights of a block in hidden^2: a double block has 36, a single one 15 (flux_keys.original_shapes).
    weights = [sum(36 if b < 19 else 15 for chunk in stage for b in chunk) for stage in stages]
    assert max(blocks) - min(blocks) <= 1
    assert max(weights) / sum(weights) <= 1.1 / count


def test_shares_size_the_stages():
    big, small = split_blocks(19, 38, (24.0, 16.0))
    assert sum(map(len, big)) == 34 and sum(map(len, small)) == 23


def test_too_few_blocks_of_one_kind_make_plain_stages():
    assert split_blocks(1, 3, (1.0, 1.0)) == ((range(2),), (range(2, 4),))
    assert split_blocks(2, 4, (1.0,) * 4) == ((range(1),), (range(1, 2),), (range(2, 4),), (range(4, 6),))
