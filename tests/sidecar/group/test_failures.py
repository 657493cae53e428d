"""Ranks that die, raise, hang or give a wrong answer: the right one is named, and the next request works."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_backend.errors import CheckpointError, RankFailed, TransportError
from parallel_backend.sidecar.group.failures import FAILING, FAILURES_UNTIL_BROKEN
from parallel_backend.sidecar.resume import ShippedRequest
from parallel_backend.sidecar.sidecar import State
from parallel_backend.wire import deadlines
from scripted import FLOOD, RAISE, RAISE_ALL, SLOW, call_model, is_running, scripted_request, two_ranks


def test_a_first_step_has_time_by_the_size_of_what_it_computes(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    asked = []

    def allowance(positions: int, on_cpu: bool) -> float:
        asked.append((positions, on_cpu))
        return 3600.0

    # Without an allowance for its size, a first step would exceed its limit at once.
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0 if earlier else 0.0)
    monkeypatch.setattr(deadlines, "size_allowance", allowance)
    sidecar.sample(weights, scripted_request(SLOW, steps=1), two_ranks())
    call_model(sidecar, weights, behaviour=SLOW)
    assert set(asked) == {(36, True), (72, True)}  # 6 x 6 positions, in one row and in two rows
    monkeypatch.setattr(deadlines, "size_allowance", lambda positions, on_cpu: 0.0)
    with pytest.raises(RankFailed, match="gave no sign of life"):
        sidecar.sample(weights, scripted_request(SLOW, steps=1), two_ranks())


def test_an_image_of_8192_pixels_has_hours_on_a_cpu_and_a_usual_one_five_minutes():
    usual, large = (128 * 128, 1024 * 1024)
    assert deadlines.size_allowance(usual, False) == 0 and deadlines.size_allowance(usual, True) < 10
    assert deadlines.size_allowance(large, False) == 15 * deadlines.FIRST_STEP
    assert deadlines.size_allowance(large, True) > 8 * 3600


def test_a_flood_on_stderr_does_not_hold_up_a_request(sidecar, weights):
    result = sidecar.sample(weights, scripted_request(FLOOD, steps=3), two_ranks())
    assert len(result.info.step_seconds) == 3


def test_a_file_that_is_cut_short_under_the_ranks_is_named_and_blames_no_device(sidecar, weights):
    def cut(step, of, denoised):
        if step == 2:
            path.write_text("good")
            os.kill(sidecar.pids[0], signal.SIGBUS)  # as reading the missing part would

    path = Path(weights.path)
    for _ in range(FAILURES_UNTIL_BROKEN):
        path.write_text("good 0.5")
        with pytest.raises(
            CheckpointError, match=r"good\.safetensors was cut short .* of 8 bytes 4 are left"
        ):
            sidecar.sample(weights, scripted_request(SLOW, steps=100), two_ranks(), on_step=cut)
    path.write_text("good 0.5")
    sidecar.sample(weights, scripted_request(), two_ranks())
    # If the file is replaced, the ranks keep the old one mapped: this is an ordinary crash.
    kept = path.with_suffix(".kept")

    def replace(step, of, denoised):
        if step == 2:
            path.replace(kept)
            path.write_text("good")
            os.kill(sidecar.pids[0], signal.SIGBUS)

    with pytest.raises(RankFailed, match="killed by SIGBUS"):
        sidecar.sample(weights, scripted_request(SLOW, steps=100), two_ranks(), on_step=replace)
    FAILING.clear()


def test_errors_that_the_code_raises_end_the_group_and_count_against_neither_it_nor_a_device(
    sidecar, weights, monkeypatch
):
    counted = []
    monkeypatch.setattr(FAILING, "add", lambda *failure: counted.append(failure))
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0)  # no step reaches its limit
    monkeypatch.setattr(deadlines, "REPORT", 0.5)
    on_one = r"(?s)process 1 failed: ValueError: the tensor is upside down.*Traceback"
    for behaviour, words in ((RAISE, on_one), (RAISE_ALL, "every process refuses")) * 2:
        sidecar.load(weights)
        pids = sidecar.pids
        with pytest.raises(RankFailed, match=words) as caught:
            sidecar.sample(weights, scripted_request(behaviour), two_ranks())
        assert (caught.value.crashed, caught.value.reason) == (False, "error")
        assert not any(map(is_running, pids))
    assert sidecar.state is State.FAILED
    assert counted == []
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY


def test_a_result_of_another_shape_ends_the_group(sidecar, weights):
    sidecar.load(weights)
    job = replace(ShippedRequest.of(scripted_request()), noise=torch.zeros(1, 4, 6, 7))
    with pytest.raises(TransportError, match=r"process 0 answered.*6, 6"):
        sidecar.sample(weights, job, two_ranks())
    assert sidecar.pids == ()
