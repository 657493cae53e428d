"""Stages: every block once, in order, and even in time and in memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.stages import split_blocks


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
