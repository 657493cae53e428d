"""Whole, sharded and sliced weights on one warm group of real ranks, as a caller sees them, with a tiny Flux."""

from __future__ import annotations

import shutil

import pytest
import torch

from differences import relative_difference
from flux_requests import flux_request
from parallel_backend.errors import CheckpointError, OutOfMemory, StrategyError
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
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


@pytest.mark.parametrize("strategy", [SHARDED, SLICED], ids=lambda s: s.describe())
def test_a_refused_file_leaves_the_group_and_its_model_alone(two_real_ranks, flux, tmp_path, strategy):
    expected = two_real_ranks.sample(flux, flux_request(), Placement(strategy)).latent
    pids = two_real_ranks.pids
    bad = tmp_path / "bad.safetensors"
    shutil.copy(flux.path, bad)
    with bad.open("r+b") as file:
        file.truncate(10_000)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors is refused"):
        two_real_ranks.sample(ModelSpec(str(bad)), flux_request(), Placement(strategy))
    assert two_real_ranks.load(flux, strategy).cached
    assert torch.equal(two_real_ranks.sample(flux, flux_request(), Placement(strategy)).latent, expected)
    assert two_real_ranks.pids == pids


def test_memory_that_ends_on_one_rank_leaves_the_group_usable(no_leaks, flux, tmp_path):
    large = ModelSpec(str(shutil.copy(flux.path, tmp_path / "too large.safetensors")))
    sidecar = Sidecar(("cpu:0", "cpu:1"), rank_module="tests.support.rank_programs.short_of_memory_rank")
    try:
        expected = sidecar.sample(flux, flux_request(), Placement(SHARDED)).latent
        pids = sidecar.pids
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="Process 1 ran out of memory"):
                sidecar.sample(large, flux_request(), Placement(SHARDED))
        assert torch.equal(sidecar.sample(flux, flux_request(), Placement(SHARDED)).latent, expected)
        assert sidecar.pids == pids
    finally:
        sidecar.stop()


def test_what_a_pipeline_cannot_do_is_refused_and_the_group_lives_on(two_real_ranks, flux):
    two_real_ranks.load(flux, SLICED)
    pids = two_real_ranks.pids
    strategy = ParallelStrategy(pipefusion_degree=2, shard_weights=True)
    with pytest.raises(StrategyError, match="pipefusion_degree 2 with shard_weights"):
        two_real_ranks.sample(flux, flux_request(), Placement(strategy))
    two_real_ranks.sample(flux, flux_request(), Placement(SLICED))
    assert two_real_ranks.pids == pids
