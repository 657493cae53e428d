"""Sleep and wake: memory goes back, the next job wakes the ranks by itself, and gives the same bits."""

import os
import signal

import pytest
import torch

from flux_requests import flux_request
from parallel_backend.errors import RequestError
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from scripted import scripted_request, two_ranks
from tiny_flux import write_tiny_flux
from waiting import PATIENCE


def test_ranks_that_slept_give_the_same_bits_however_they_hold_the_weights(two_real_ranks, tmp_path):
    flux = ModelSpec(
        path=str(write_tiny_flux(tmp_path / "tiny.safetensors", double_blocks=2, single_blocks=2))
    )
    sidecar = two_real_ranks
    for strategy in (
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, warmup_steps=4),
        ParallelStrategy(ulysses_degree=2),
    ):
        before, pids = sidecar.sample(flux, flux_request(), Placement(strategy)).latent, sidecar.pids
        for level, loads in ((1, []), (2, ["loading tiny.safetensors"])):
            phases = []
            assert sidecar.sleep(level).seconds > 0
            assert sidecar.state is State.ASLEEP
            after = sidecar.sample(flux, flux_request(), Placement(strategy), on_phase=phases.append)
            assert sidecar.state is State.READY
            assert torch.equal(after.latent, before)
            shown = [phase for phase in phases if not phase.startswith("loaded in")]
            assert shown == ["waking the processes", *loads, "first step", "sampling"]
    for level in (1, 2):
        sidecar.sleep(level)
        assert sidecar.wake().seconds > 0
        assert sidecar.load(flux, strategy).cached and sidecar.pids == pids


def test_a_deeper_sleep_follows_a_light_one_and_a_lighter_changes_nothing(sidecar, weights):
    sidecar.load(weights)
    sidecar.sleep(1)
    sidecar.sleep(2)
    assert sidecar.sleep(1).seconds == 0.0
    assert sidecar.state is State.ASLEEP
    assert not sidecar.load(weights).cached
    sidecar.sample(weights, scripted_request(), two_ranks())


def test_ranks_that_do_not_run_have_nothing_to_give_back(sidecar, weights):
    assert sidecar.sleep().seconds == sidecar.wake().seconds == 0.0
    assert sidecar.state is State.DOWN
    with pytest.raises(RequestError, match="level 3 is unknown"):
        sidecar.sleep(3)


def test_a_rank_that_dies_asleep_is_no_obstacle(sidecar, weights):
    sidecar.load(weights)
    sidecar.sleep(1)
    group = sidecar._ranks.group
    os.kill(sidecar.pids[0], signal.SIGKILL)
    assert group.gone.wait(PATIENCE)
    assert sidecar.state is State.FAILED
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY
