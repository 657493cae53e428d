"""Ranks that die, raise, hang or answer what is none: who is named, and that the next request works."""

import os
import signal
from pathlib import Path

import pytest

from parallel_backend.errors import (
    CheckpointError,
    OutOfMemory,
    RankFailed,
    TransportError,
)
from parallel_backend.sidecar.group.device_health import FAILING
from parallel_backend.sidecar.group.restart_policy import FAILURES_UNTIL_BROKEN
from parallel_backend.sidecar.group.supervisor import Supervisor
from parallel_backend.sidecar.resume import ResumableJob
from parallel_backend.sidecar.sidecar import State
from parallel_backend.wire import deadlines
from scripted import (
    CRASH,
    FLOOD,
    NO_MEMORY,
    RAISE,
    RAISE_ALL,
    SLOW,
    STUCK,
    call_model,
    is_running,
    scripted_request,
    two_ranks,
)
from waiting import wait_until


def test_a_rank_killed_while_idle_is_noticed_and_the_next_request_works(sidecar, weights):
    sidecar.load(weights)
    victim, survivor = sidecar.pids
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: sidecar.state is State.FAILED and not is_running(survivor))
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_request_is_named_at_once_and_the_next_request_works(
    sidecar, weights, monkeypatch, rank
):
    sidecar.load(weights)
    steps = []

    def on_step(step, of, denoised):
        steps.append(step)
        if step == 2:
            os.kill(sidecar.pids[rank], signal.SIGKILL)

    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0)  # the death is what is noticed
    with pytest.raises(RankFailed, match=f"process {rank} failed: killed by SIGKILL") as caught:
        sidecar.sample(weights, scripted_request(SLOW, steps=100), two_ranks(), on_step=on_step)
    assert max(steps) < 100
    assert caught.value.rank == rank
    assert sidecar.state is State.FAILED
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY


def test_a_rank_that_kills_itself_in_a_collective_is_named_and_not_its_victim(sidecar, weights):
    with pytest.raises(RankFailed, match="process 1 failed: killed by SIGKILL"):
        sidecar.sample(weights, scripted_request(CRASH), two_ranks())


def test_one_rank_that_raises_frees_the_others_by_ending_the_group(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    pids = sidecar.pids
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0)  # nobody waits for a step's limit
    with pytest.raises(
        RankFailed, match=r"(?s)process 1 failed: ValueError: the tensor is upside down.*Traceback"
    ) as caught:
        sidecar.sample(weights, scripted_request(RAISE), two_ranks())
    assert caught.value.reason == "error"
    assert not any(map(is_running, pids))
    sidecar.sample(weights, scripted_request(), two_ranks())


def test_an_error_on_every_rank_is_raised_once(sidecar, weights):
    with pytest.raises(RankFailed, match="every process refuses"):
        call_model(sidecar, weights, behaviour=RAISE_ALL)
    call_model(sidecar, weights)


def test_a_rank_without_memory_says_so_with_a_remedy(sidecar, weights):
    with pytest.raises(OutOfMemory, match=r"Process 1 ran out of memory on cpu .*smaller image"):
        sidecar.sample(weights, scripted_request(NO_MEMORY), two_ranks())
    sidecar.sample(weights, scripted_request(), two_ranks())


def test_a_rank_that_stands_still_is_named_when_its_time_is_up(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    pids = sidecar.pids
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 0.5)
    with pytest.raises(RankFailed, match=r"process 1 failed: was stopped by a signal"):
        sidecar.sample(weights, scripted_request(STUCK), two_ranks())
    assert not any(map(is_running, pids))


def test_a_first_step_has_time_by_the_size_of_what_it_computes(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    asked = []

    def allowance(positions: int, on_cpu: bool) -> float:
        asked.append((positions, on_cpu))
        return 3600.0

    # A step of a usual size would be over before any of these is.
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 3600.0 if earlier else 0.0)
    monkeypatch.setattr(deadlines, "size_allowance", allowance)
    sidecar.sample(weights, scripted_request(SLOW, steps=1), two_ranks())
    call_model(sidecar, weights, behaviour=SLOW)
    assert set(asked) == {(36, True), (72, True)}  # of 6 x 6 positions, one row and two
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


def test_ranks_that_fail_again_and_again_are_left_alone_for_a_while(sidecar, weights, monkeypatch):
    for _ in range(FAILURES_UNTIL_BROKEN):
        with pytest.raises(RankFailed):
            sidecar.sample(weights, scripted_request(CRASH), two_ranks())
    assert sidecar.state is State.BROKEN
    with monkeypatch.context() as patched:
        patched.setattr(Supervisor, "spawn", lambda *arguments: pytest.fail("processes were started"))
        with pytest.raises(
            RankFailed,
            match=r"(?s)failed 3 times within 10 minutes.*doctor.*process 1 on cpu:1: killed by SIGKILL",
        ):
            call_model(sidecar, weights)
    sidecar.stop()
    call_model(sidecar, weights)


def test_a_file_that_is_cut_short_under_the_ranks_is_named_and_blames_no_device(sidecar, weights):
    def cut(step, of, denoised):
        if step == 2:
            path.write_text("good")
            os.kill(sidecar.pids[0], signal.SIGBUS)  # what reading the rest of it does

    path = Path(weights.path)
    for _ in range(FAILURES_UNTIL_BROKEN):
        path.write_text("good 0.5")
        with pytest.raises(
            CheckpointError, match=r"good\.safetensors was cut short .* of 8 bytes 4 are left"
        ):
            sidecar.sample(weights, scripted_request(SLOW, steps=100), two_ranks(), on_step=cut)
    path.write_text("good 0.5")
    sidecar.sample(weights, scripted_request(), two_ranks())
    # Another file in its place leaves the ranks what they have: it is a crash like any other.
    kept = path.with_suffix(".kept")

    def replace(step, of, denoised):
        if step == 2:
            path.replace(kept)
            path.write_text("good")
            os.kill(sidecar.pids[0], signal.SIGBUS)

    with pytest.raises(RankFailed, match="killed by SIGBUS"):
        sidecar.sample(weights, scripted_request(SLOW, steps=100), two_ranks(), on_step=replace)
    FAILING.clear()


def test_errors_that_the_code_raises_count_against_neither_the_group_nor_a_device(
    sidecar, weights, monkeypatch
):
    counted = []
    monkeypatch.setattr(FAILING, "add", lambda *failure: counted.append(failure))
    for behaviour in (RAISE, RAISE_ALL, RAISE, RAISE_ALL):
        with pytest.raises(RankFailed) as caught:
            sidecar.sample(weights, scripted_request(behaviour), two_ranks())
        assert not caught.value.crashed
    assert sidecar.state is State.FAILED
    assert counted == []
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.state is State.READY


def test_a_result_of_another_shape_ends_the_group(sidecar, weights, monkeypatch):
    sidecar.load(weights)
    with monkeypatch.context() as patched, pytest.raises(TransportError, match=r"process 0 answered.*6, 6"):
        patched.setattr(ResumableJob, "shape", (1, 4, 6, 7))
        sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.pids == ()
