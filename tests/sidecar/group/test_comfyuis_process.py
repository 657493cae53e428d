"""Ranks are looked after as usual where other code of ComfyUI's process collects its ended children, and where all
processes are paused together."""

import pytest

from fault_injection import CHILDREN_IGNORED, REAPING_THREAD
from forked_scripts import run_forked

A_RANK_DIES = """
from parallel_backend.wire import deadlines
sidecar = scripted_sidecar()
with fault("kill", "an all-reduce", step=2):
    try:
        sidecar.sample(weights, scripted_request(), two_ranks())
    except RankFailed as error:
        print(error)
sidecar.sample(weights, scripted_request(), two_ranks())
deadlines.REAP = 3600
sidecar.stop()  # would not return where the end of a rank is missed
print("stopped", sidecar.state.value)
"""
# Stops all processes, as `docker pause` does, between two steps and for longer than a step may take.
EVERYTHING_PAUSES = """
import subprocess, time
from parallel_backend.wire import deadlines
from scripted import SLOW
deadlines.step_budget = lambda earlier: 2.0
sidecar = scripted_sidecar()
sidecar.load(weights)
pids, times = sidecar.pids, []
def on_step(step, steps, denoised):
    times.append(time.monotonic())
    if step == 3:
        everything = " ".join(map(str, [os.getpid(), *pids]))
        subprocess.Popen(["sh", "-c", f"kill -STOP {everything}; sleep 3; kill -CONT {everything}"])
sidecar.sample(weights, scripted_request(SLOW, steps=30), two_ranks(), on_step=on_step)
longest = max(after - before for before, after in zip(times, times[1:]))
print("same" if sidecar.pids == pids else "other", "ranks,", "paused" if longest > 2.5 else "not paused")
sidecar.stop()
"""

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("elsewhere", [REAPING_THREAD, CHILDREN_IGNORED], ids=["a thread", "the kernel"])
def test_ranks_whose_end_something_else_collects_are_noticed_all_the_same(tmp_path, elsewhere):
    out = run_forked(elsewhere + A_RANK_DIES, tmp_path)
    assert "process 1 failed: " in out
    assert "stopped down" in out


def test_a_pause_of_everything_together_is_no_hang(tmp_path):
    assert "same ranks, paused" in run_forked(EVERYTHING_PAUSES, tmp_path)
