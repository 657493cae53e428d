"""Sleep and wake: ranks free their memory, the next job wakes them by itself, and gives the same bits."""

import os
import signal

import torch

from flux_requests import flux_request
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.model_room import CountedModel
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from scripted import scripted_request, two_ranks
from tiny_flux import write_tiny_flux
from waiting import PATIENCE


def test_ranks_that_gave_memory_back_give_the_same_bits_however_they_hold_the_weights(
    two_real_ranks, tmp_path, monkeypatch
):
    # Counts weights as if they were on devices: on the CPU they are the mapped file.
    monkeypatch.setattr(CountedModel, "bytes_on", lambda model, rank: int(rank not in model.offloaded_ranks))
    flux = ModelSpec(
        path=str(write_tiny_flux(tmp_path / "tiny.safetensors", double_blocks=2, single_blocks=2))
    )
    sidecar = two_real_ranks

    def give_back():
        for device in sidecar.devices:
            sidecar.give_back(flux, device)
            assert sidecar.held.bytes_on(flux, device) == 0

    for strategy in (
        ParallelStrategy(ulysses_degree=2, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, warmup_steps=4),
        ParallelStrategy(ulysses_degree=2),
    ):
        before, pids = sidecar.sample(flux, flux_request(), Placement(strategy)).latent, sidecar.pids
        for act, state, loads in (
            (give_back, State.READY, []),
            (sidecar.sleep, State.ASLEEP, ["loading tiny.safetensors"]),
        ):
            phases = []
            act()
            assert sidecar.state is state
            after = sidecar.sample(flux, flux_request(), Placement(strategy), on_phase=phases.append)
            assert sidecar.state is State.READY
            assert torch.equal(after.latent, before)
            shown = [phase for phase in phases if not phase.startswith("loaded in")]
            assert shown == ["waking the processes", *loads, "first step", "sampling"]
    sidecar.sleep()
    sidecar.wake()
    assert sidecar.load(flux, strategy).cached and sidecar.pids == pids


def test_ranks_that_sleep_already_and_ranks_that_do_not_run_have_nothing_to_give_back(sidecar, weights):
    sidecar.sleep()
    sidecar.wake()
    assert sidecar.state is State.DOWN
    sidecar.load(weights)
    sidecar.sleep()
    sidecar.sleep()
    assert sidecar.state is State.ASLEEP
    sidecar.wake()
    assert sidecar.load(weights).cached


def test_a_rank_that_dies_asleep_is_no_obstacle(sidecar, weights):
    sidecar.load(weights)
    sidecar.sleep()
    group = sidecar._ranks.group
    os.kill(sidecar.pids[0], signal.SIGKILL)
    assert group.gone.wait(PATIENCE)
    assert sidecar.state is State.FAILED
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY
