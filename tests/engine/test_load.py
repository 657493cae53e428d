"""Whole, sharded and sliced weights on one warm group of real ranks, as a caller sees them, with a tiny Flux."""

from __future__ import annotations

import pytest

from differences import relative_difference
from flux_requests import flux_request
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5
WHOLE = ParallelStrategy(ulysses_degree=2)
SHARDED = ParallelStrategy(ulysses_degree=2, shard_weights=True)
SHARDED_BY_ROWS = ParallelStrategy(cfg_degree=2, shard_weights=True)
SLICED = ParallelStrategy(tensor_degree=2)


@pytest.fixture
def flux(tmp_path):
    return ModelSpec(path=str(write_tiny_flux(tmp_path / "tiny.safetensors")))


def test_one_warm_group_changes_between_whole_sharded_and_sliced_weights(two_real_ranks, flux):
    expected = two_real_ranks.sample(flux, flux_request(), Placement(WHOLE)).latent
    pids = two_real_ranks.pids
    for strategy in (SHARDED, SHARDED_BY_ROWS, SLICED, WHOLE, SLICED, SHARDED):
        result = two_real_ranks.sample(flux, flux_request(), Placement(strategy))
        assert relative_difference(result.latent, expected) <= TOLERANCE, strategy.describe()
        assert result.info.strategy == strategy
        assert two_real_ranks.pids == pids


def test_strategies_that_hold_the_same_shares_need_no_second_load(two_real_ranks, flux):
    assert not two_real_ranks.load(flux, SHARDED).cached
    assert two_real_ranks.load(flux, SHARDED_BY_ROWS).cached
    assert not two_real_ranks.load(flux, SLICED).cached
    assert not two_real_ranks.load(flux, SHARDED).cached
