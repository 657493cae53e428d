"""A sidecar from the caller's side: real rank processes, one outcome per request whatever happens to them."""

import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

from parallel_backend.errors import CheckpointError, RequestError, StrategyError
from parallel_backend.requests import Placement
from parallel_backend.sidecar.resume import ShippedRequest
from parallel_backend.sidecar.sidecar import State
from parallel_backend.strategy import ParallelStrategy
from scripted import call_model, is_running, scripted_request, scripted_sidecar, scripted_weights, two_ranks


def test_a_sample_comes_back_with_how_it_ran_each_step_and_every_phase_in_words(sidecar, weights):
    request, steps, phases = scripted_request(steps=3), [], []
    result = sidecar.sample(
        weights, request, two_ranks(), on_step=lambda *step: steps.append(step), on_phase=phases.append
    )
    expected = request.noise  # euler with velocity 0.5 x: x += (sigma' - sigma) * 0.5 x
    for _ in range(3):
        expected = expected + (-1 / 3) * 0.5 * expected
    assert torch.allclose(result.latent, expected, atol=1e-6)
    assert len(result.info.step_seconds) == 3
    assert result.info.bytes_sent == (12, 12)
    assert (result.info.engine, result.info.strategy) == ("scripted", two_ranks().strategy)
    assert [(step, of) for step, of, _ in steps] == [(1, 3), (2, 3), (3, 3)]
    assert torch.allclose(steps[-1][2], result.latent, atol=1e-6)  # at sigma 0 the latent is the denoised one
    seconds = re.fullmatch(r"loaded in (\d\.\d) s", phases[2])
    assert seconds and phases == [
        "starting 2 processes",
        "loading good.safetensors",
        seconds[0],
        "first step",
        "sampling",
    ]


def test_a_group_stays_warm_between_requests(sidecar, weights):
    assert sidecar.state is State.DOWN
    assert sidecar.start() > 0
    assert sidecar.state is State.READY
    pids = sidecar.pids
    first = sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.start() == 0.0
    assert sidecar.load(weights).cached
    second = sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.pids == pids
    assert torch.equal(first.latent, second.latent)
    sidecar.stop()
    assert sidecar.state is State.DOWN
    assert not any(map(is_running, pids))


def test_a_file_that_is_not_there_is_refused_before_a_rank_starts(sidecar, weights):
    with pytest.raises(CheckpointError, match="No such file"):
        sidecar.load(replace(weights, path="/nowhere/flux.safetensors"))
    assert sidecar.state is State.DOWN


def test_a_strategy_of_another_size_is_refused(sidecar, weights):
    with pytest.raises(StrategyError, match="needs 3 processes; this group has 2"):
        sidecar.sample(weights, scripted_request(), Placement(ParallelStrategy(ring_degree=3)))


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_cache_threshold_that_compares_with_nothing_is_refused(sidecar, weights, threshold):
    job = replace(ShippedRequest.of(scripted_request()), cache_threshold=threshold)
    with pytest.raises(RequestError, match="cache_threshold"):
        sidecar.sample(weights, job, two_ranks())


def test_requests_of_several_threads_are_served_one_after_another(sidecar, weights):
    results = {}

    def work(number):
        x = torch.full((1, 4, 6, 6), float(number))
        results[number] = call_model(sidecar, weights, x)[0].mean().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number * 0.5 for number in range(6)}


def test_two_sidecars_side_by_side_do_not_disturb_each_other(sidecar, weights, tmp_path):
    other = scripted_sidecar(("cpu:2", "cpu:3"))
    try:
        x = torch.ones(1, 4, 6, 6)
        double = scripted_weights(tmp_path / "double.safetensors", "good 2.0")
        for _ in range(2):
            assert torch.allclose(call_model(sidecar, weights, x)[0], x * 0.5)
            assert torch.allclose(call_model(other, double, x)[0], x * 2)
        os.kill(other.pids[0], signal.SIGKILL)
        sidecar.sample(weights, scripted_request(), two_ranks())
    finally:
        other.stop()


def test_the_group_outlives_the_thread_that_started_it(sidecar, weights):
    starter = threading.Thread(target=sidecar.load, args=(weights,))
    starter.start()
    starter.join()
    time.sleep(0.2)
    assert len(sidecar.pids) == 2 and all(map(is_running, sidecar.pids))
    sidecar.sample(weights, scripted_request(), two_ranks())
