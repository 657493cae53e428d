"""Sleep and wake: memory goes back, the next job wakes the ranks by itself, and gives the same bits."""

import os
import signal

import pytest
import torch

from parallel_backend.client import Sidecar, State
from parallel_backend.errors import RequestError
from parallel_backend.requests import ModelSpec, Placement
from scripted import scripted_request, two_ranks
from test_rank import flux_request
from tiny_flux import write_tiny_flux


@pytest.mark.parametrize("level", [1, 2])
def test_a_rank_that_slept_gives_the_same_bits(no_leaks, tmp_path, level):
    flux = ModelSpec(path=str(write_tiny_flux(tmp_path / "tiny.safetensors")))
    sidecar, phases = Sidecar(("cpu:0",)), []
    try:
        before = sidecar.sample(flux, flux_request(), Placement()).latent
        pids = sidecar.pids
        assert sidecar.sleep(level).seconds > 0
        assert sidecar.state is State.ASLEEP
        after = sidecar.sample(flux, flux_request(), Placement(), on_phase=phases.append).latent
        assert sidecar.state is State.READY
        sidecar.sleep(level)
        assert sidecar.wake().seconds > 0
        assert sidecar.load(flux).cached and sidecar.pids == pids
    finally:
        sidecar.stop()
    assert torch.equal(after, before)
    assert phases == ["waking the ranks", *(["loading tiny.safetensors"] if level == 2 else []), "first step"]


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
    group = sidecar._group
    os.kill(sidecar.pids[0], signal.SIGKILL)
    assert group.gone.wait(2.0)
    assert sidecar.state is State.FAILED
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY
