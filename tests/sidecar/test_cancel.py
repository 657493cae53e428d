"""A request that is cancelled, stopped or broken off by its caller: it ends, and the group stays warm."""

import os
import signal
import threading

import pytest

from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.sidecar.sidecar import State
from parallel_backend.wire import deadlines
from scripted import SLOW, is_running, scripted_request, two_ranks


class Stopped(BaseException):
    """Stands in for ComfyUI's InterruptProcessingException, which is a BaseException."""


@pytest.fixture
def stays_warm(sidecar, weights):
    """Loads the model; after the test the same ranks serve the next request."""
    sidecar.load(weights)
    pids = sidecar.pids
    yield
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.pids == pids


@pytest.mark.parametrize("after", [1, 6], ids=["first", "last"])
def test_cancel_ends_the_request_at_the_next_step_and_leaves_the_group_warm(
    stays_warm, sidecar, weights, after
):
    steps = []

    with pytest.raises(Cancelled):
        sidecar.sample(
            weights,
            scripted_request(SLOW, steps=6),
            two_ranks(),
            on_step=lambda step, of, denoised: steps.append(step),
            should_cancel=lambda: after in steps,
        )
    assert len(steps) == after  # steps that still run are not reported
    assert sidecar.state is State.READY


def test_a_cancel_before_a_request_is_sent_reaches_no_rank(stays_warm, sidecar, weights):
    with pytest.raises(Cancelled):
        sidecar.sample(weights, scripted_request(), two_ranks(), should_cancel=lambda: True)


def test_a_start_that_is_cancelled_leaves_no_rank(sidecar, weights):
    def is_starting():
        return sidecar.state is State.STARTING

    with pytest.raises(Cancelled):
        sidecar.sample(weights, scripted_request(), two_ranks(), should_cancel=is_starting)
    assert sidecar.state is State.DOWN and sidecar.pids == ()


def test_whatever_a_callback_raises_cancels_the_job_and_leaves_the_group_warm(stays_warm, sidecar, weights):
    def on_step(step, of, denoised):
        if step == 2:
            raise Stopped

    with pytest.raises(Stopped):  # ranks that continued to the last step would be killed
        sidecar.sample(weights, scripted_request(SLOW, steps=2000), two_ranks(), on_step=on_step)


def test_a_callback_may_not_send_another_request(stays_warm, sidecar, weights):
    with pytest.raises(RequestError, match="callback"):
        sidecar.sample(weights, scripted_request(), two_ranks(), on_step=lambda *step: sidecar.load(weights))


def test_a_cancel_that_the_ranks_do_not_follow_ends_them(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    monkeypatch.setattr(deadlines, "CANCEL", 0.3)

    def on_step(step, of, denoised):
        os.kill(sidecar.pids[1], signal.SIGSTOP)
        raise Stopped

    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0)  # so this limit does not end them
    with pytest.raises(Stopped):
        sidecar.sample(weights, scripted_request(SLOW, steps=50), two_ranks(), on_step=on_step)
    assert sidecar.pids == ()


def test_stop_ends_a_running_request(sidecar, weights):
    sidecar.load(weights)
    pids = sidecar.pids
    begun = threading.Event()
    stopper = threading.Thread(target=lambda: (begun.wait(), sidecar.stop()))
    stopper.start()
    with pytest.raises(Cancelled):
        sidecar.sample(
            weights, scripted_request(SLOW, steps=200), two_ranks(), on_step=lambda *step: begun.set()
        )
    stopper.join()
    assert not any(map(is_running, pids))
    assert sidecar.state is State.DOWN


def test_stop_from_a_callback_ends_the_request(sidecar, weights):
    with pytest.raises(Cancelled):
        sidecar.sample(
            weights, scripted_request(SLOW, steps=50), two_ranks(), on_step=lambda *step: sidecar.stop()
        )
    assert sidecar.pids == ()
