"""Injected faults (numbers: docs/reliability.md): the right rank is named, nothing stays, the next job is bit-equal."""

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch

from fault_injection import (
    BESIDE_OTHERS,
    FEW_DESCRIPTORS,
    ONE_JOB,
    OUT_OF_HOST_MEMORY,
    fault,
    full_temporary_folder,
    in_control_group,
    without_hostname,
)
from flux_requests import flux_request
from forked_scripts import ForkedScript, run_forked
from parallel_backend.errors import Cancelled, DeviceError, OutOfMemory, ParallelError, RankFailed
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.group import exchange, liveness
from parallel_backend.sidecar.group.failures import FAILING
from parallel_backend.sidecar.group.supervisor import Supervisor
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire import deadlines
from scripted import (
    SLOW,
    is_running,
    ranks_of,
    scripted_request,
    scripted_sidecar,
    scripted_weights,
    two_ranks,
)
from tiny_flux import write_tiny_flux
from waiting import wait_until


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns the latent that every job here must give, from ranks without a fault."""
    spec = scripted_weights(tmp_path_factory.mktemp("plain") / "plain.safetensors", "good 0.5")
    sidecar = scripted_sidecar()
    try:
        return sidecar.sample(spec, scripted_request(), two_ranks()).latent
    finally:
        sidecar.stop()


@pytest.fixture
def works_again(sidecar, weights, expected):
    """Checks after the test that the next job gives the expected bits."""
    yield
    assert torch.equal(sidecar.sample(weights, scripted_request(), two_ranks()).latent, expected)
    assert sidecar.state is State.READY


# 2 to 4: a process ends.


@pytest.mark.parametrize(
    ("kind", "name"), [("kill", "SIGKILL"), ("segfault", "SIGSEGV"), ("abort", "SIGABRT")]
)
def test_a_rank_that_dies_in_a_collective_is_named_with_its_signal(works_again, sidecar, weights, kind, name):
    with (
        fault(kind, "an all-reduce", step=2),
        pytest.raises(RankFailed, match=f"process 1 failed: killed by {name}") as caught,
    ):
        sidecar.sample(weights, scripted_request(), two_ranks())
    assert caught.value.crashed
    if kind != "kill":
        assert "faults.py" in caught.value.cause  # faulthandler shows where it was


def test_nothing_of_a_job_that_crashed_is_kept(works_again, sidecar, weights):
    """The record of a crash must not hold the frames of its traceback, which hold the model and the latent."""

    def crash():
        request = scripted_request()
        with fault("kill", "an all-reduce", step=2), suppress(RankFailed):
            sidecar.sample(weights, request, two_ranks())
        assert sidecar.state is State.FAILED
        return weakref.ref(request)

    request = crash()
    gc.collect()
    assert request() is None


def test_the_hosts_out_of_memory_killer_is_named_with_how_much_the_rank_held(no_leaks, tmp_path):
    """Runs in its own control group, which its ranks share."""
    with in_control_group(1500 * 2**20) as join:
        if join is None:
            pytest.skip("no right to make a control group")
        out = run_forked(OUT_OF_HOST_MEMORY, tmp_path, join)
    assert "process 1 failed: killed by SIGKILL: host memory ran out" in out
    assert "of the 1.5 GiB there are" in out and "fine" in out


# 5: an exception on one rank.


def test_memory_that_ends_on_one_rank_is_raised_as_such_and_not_tried_again(
    resuming_sidecar, weights, expected, monkeypatch, tmp_path
):
    monkeypatch.setattr(deadlines, "REPORT", 0.5)  # s; the other rank waits in the collective
    with (
        fault("oom", "an all-reduce", step=2, once=tmp_path / "fired"),
        pytest.raises(OutOfMemory, match=r"Process 1 ran out of memory on cpu .*smaller image"),
    ):
        resuming_sidecar.sample(weights, scripted_request(), two_ranks())
    assert torch.equal(resuming_sidecar.sample(weights, scripted_request(), two_ranks()).latent, expected)


# 6 to 8: a rank hangs.


@pytest.mark.parametrize("kind", ["sleep", "stop", "gil"])
def test_a_rank_that_hangs_is_named_with_the_collective(works_again, sidecar, weights, monkeypatch, kind):
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 2.0)
    with (
        fault(kind, "an all-reduce", step=2),
        pytest.raises(RankFailed, match=r"process 1 failed: .*limit here is 2 s") as caught,
    ):
        sidecar.sample(weights, scripted_request(), two_ranks())
    assert caught.value.reason == "hang"
    assert "missed in an all-reduce by process 0, after 2 steps" in caught.value.cause
    assert ("was stopped by a signal" in caught.value.cause) == (kind == "stop")
    assert ("faults.py" in caught.value.cause) == (kind != "stop")  # where it hangs


@pytest.mark.parametrize("point", ["an all-reduce", "load"])
def test_a_rank_that_computes_for_longer_than_its_limit_is_not_taken_for_hung(
    works_again, sidecar, weights, expected, monkeypatch, tmp_path, point
):
    # s; longer than ranks wait for each other on a busy processor, and shorter than the fault computes
    monkeypatch.setattr(deadlines, "step_budget", lambda earlier: 2.0)
    monkeypatch.setattr(deadlines, "load_budget", lambda size: 2.0)
    with fault("compute", point, step=2 if point == "an all-reduce" else 0, once=tmp_path / "fired"):
        result = sidecar.sample(weights, scripted_request(), two_ranks())
    assert torch.equal(result.latent, expected)


def test_a_rank_that_goes_on_while_we_look_whether_it_computes_is_not_taken_for_hung(
    works_again, sidecar, weights, expected, monkeypatch
):
    def look_until_it_has_gone_on(group, pending) -> bool:
        began = time.monotonic()
        wait_until(lambda: liveness.last_beat(group, pending) > began)
        return False

    monkeypatch.setattr(deadlines, "load_budget", lambda size: 2.0)
    monkeypatch.setattr(exchange, "is_computing", look_until_it_has_gone_on)
    with fault("compute", "load"):
        result = sidecar.sample(weights, scripted_request(), two_ranks())
    assert torch.equal(result.latent, expected)


# 9: ComfyUI is killed.


def test_ranks_that_hang_are_gone_soon_after_comfyui_was_killed(no_leaks, tmp_path):
    once = tmp_path / "fired"
    script = f"""
        sidecar = scripted_sidecar()
        with fault("gil", "an all-reduce", once=Path({str(once)!r})):
            sidecar.start()
            print(*sidecar.pids, flush=True)
            sidecar.sample(weights, scripted_request(), two_ranks())
        """
    with closing(ForkedScript(script, tmp_path)) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        wait_until(once.exists)
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)) and not ranks_of(parent.pid))


# 11: a rank does not start.


def test_a_rank_that_never_becomes_ready_is_named_and_nothing_stays(resuming_sidecar, weights, monkeypatch):
    monkeypatch.setattr(deadlines, "START", 3.0)  # s; the other rank, a fork, has said hello by then
    with fault("stop", "start"), pytest.raises(RankFailed, match="process 1 failed: was stopped by a signal"):
        resuming_sidecar.sample(weights, scripted_request(), two_ranks())
    assert resuming_sidecar.pids == ()


def test_a_rank_killed_while_ranks_start_is_named_and_the_next_prompt_works(resuming_sidecar, weights):
    with fault("kill", "start"), pytest.raises(RankFailed, match="process 1 failed: killed by SIGKILL"):
        resuming_sidecar.sample(weights, scripted_request(), two_ranks())
    assert resuming_sidecar.pids == ()
    resuming_sidecar.sample(weights, scripted_request(), two_ranks())


def test_two_ranks_on_one_device_are_refused():
    with pytest.raises(DeviceError, match="cuda:0 is named twice"):
        Sidecar(("cuda:0", "cuda:1", "cuda:0"))


# 12 and 13: cancel.


def test_a_load_that_does_not_end_is_ended_by_a_cancel(works_again, sidecar, weights, monkeypatch, tmp_path):
    monkeypatch.setattr(deadlines, "CANCEL", 0.3)
    once = tmp_path / "fired"
    with fault("sleep", "load", once=once), pytest.raises(Cancelled):
        sidecar.sample(weights, scripted_request(), two_ranks(), should_cancel=once.exists)
    assert sidecar.pids == ()


def test_a_cancel_that_races_a_crash_ends_in_one_error(works_again, sidecar, weights, monkeypatch):
    monkeypatch.setattr("parallel_backend.sidecar.group.failures.FAILURES_UNTIL_BROKEN", 100)
    outcomes = []
    for delay in (0.0, 0.05):
        sidecar.load(weights)

        killer = threading.Timer(delay, os.kill, (sidecar.pids[1], signal.SIGKILL))

        def on_step(step, steps, denoised, killer=killer):
            if step == 2:
                killer.start()

        try:
            sidecar.sample(
                weights,
                scripted_request(SLOW, steps=20),
                two_ranks(),
                on_step=on_step,
                should_cancel=lambda killer=killer: killer.ident is not None,
            )
        except ParallelError as error:
            outcomes.append(type(error))
        killer.join()
        wait_until(lambda: sidecar.state is State.FAILED)  # even if the cancel came first
    assert len(outcomes) == 2 and set(outcomes) <= {Cancelled, RankFailed}


# 14: a machine with little room.


def test_a_full_temporary_folder_and_a_tiny_shared_memory(no_leaks, tmp_path):
    """Runs in its own mount namespace."""
    before = full_temporary_folder(tmp_path / "full")
    if before is None:
        pytest.skip("no right to mount")
    out = run_forked(ONE_JOB, tmp_path, before)
    assert "fine" in out


# 15: many jobs. benchmarks/faults.py runs a thousand and measures how memory grows.


def test_many_jobs_of_changing_sizes_and_models_leave_nothing(sidecar, weights, tmp_path):
    other = scripted_weights(tmp_path / "other.safetensors", "good 2.0")
    counts = set()
    for number in range(60):
        request = scripted_request(steps=2)
        if number % 2:
            request = replace(request, noise=torch.zeros(2, 4, 9, 6))
        sidecar.sample((weights, other)[number // 4 % 2], request, two_ranks(), on_step=lambda *step: None)
        if number >= 8:
            counts.add((len(os.listdir("/proc/self/fd")), len(ranks_of(os.getpid()))))  # noqa: PTH208
    assert len(counts) == 1


# 18: what other processes have left or occupied.


def test_a_taken_port_few_descriptors_and_another_comfyui_change_nothing(no_leaks, tmp_path):
    before = without_hostname() + FEW_DESCRIPTORS
    # Each has its own model file, because a job ends if its file changes.
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    one, other = (ForkedScript(BESIDE_OTHERS, folder, before) for folder in folders)
    with closing(one), closing(other):
        assert "fine" in one.said()
        assert "fine" in other.said()


# 20: a device that is not there.


@pytest.mark.real_start
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without such a device")
def test_a_device_that_is_gone_is_named(no_leaks, weights):
    sidecar = Sidecar(("cuda:0",))
    try:
        with pytest.raises(DeviceError, match=r"cuda:0 .*is not there.*devices"):
            sidecar.sample(weights, scripted_request(), Placement())
        assert FAILING.among(("cuda:0", "cuda:1")) == ("cuda:0",)  # `auto` goes on with the rest
    finally:
        FAILING.clear()
        sidecar.stop()


# 2, with the real model and a job that is made again.


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    return ModelSpec(path=str(write_tiny_flux(tmp_path_factory.mktemp("flux") / "tiny.safetensors")))


def longer_request():
    return replace(flux_request(), sigmas=torch.linspace(1, 0, 6))


@pytest.mark.parametrize(
    ("rank", "point", "strategy"),
    [
        (0, "an all-to-all", ParallelStrategy(ulysses_degree=2)),
        (1, "a ring step", ParallelStrategy(ring_degree=2)),
        (1, "a PipeFusion hop", ParallelStrategy(pipefusion_degree=2, warmup_steps=2)),
    ],
    ids=["ulysses", "ring", "pipefusion"],
)
def test_a_job_is_made_again_after_a_rank_died_in_a_collective(
    own_real_ranks, flux, tmp_path, rank, point, strategy
):
    phases = []
    with fault("kill", point, rank=rank, step=2, once=tmp_path / "fired"):
        result = own_real_ranks.sample(flux, longer_request(), Placement(strategy), on_phase=phases.append)
    again = own_real_ranks.sample(flux, longer_request(), Placement(strategy))
    (note,) = [note for note in result.info.notes if "failed" in note]
    assert f"process {rank} on cpu:{rank} failed (killed by SIGKILL" in note and "begins again" in note
    assert note in phases
    assert len(result.info.step_seconds) == 5
    assert not result.info.load.cached  # new ranks loaded the weights again
    assert torch.equal(result.latent, again.latent)


def test_a_second_crash_is_raised_and_a_third_breaks_the_group(resuming_sidecar, weights, monkeypatch):
    sidecar = resuming_sidecar
    with fault("kill", "an all-reduce", step=1):
        for state in (State.FAILED, State.BROKEN):
            with pytest.raises(RankFailed, match="process 1 failed: killed by SIGKILL"):
                sidecar.sample(weights, scripted_request(), two_ranks())
            assert sidecar.state is state
    words = r"(?s)3 times within 10 minutes.*doctor.*s ago, process 1 on cpu:1: killed by SIGKILL"
    with monkeypatch.context() as patched, pytest.raises(RankFailed, match=words):
        patched.setattr(Supervisor, "spawn", lambda *arguments: pytest.fail("processes were started"))
        sidecar.sample(weights, scripted_request(), two_ranks())
    sidecar.stop()
    assert sidecar.state is State.DOWN
    sidecar.sample(weights, scripted_request(), two_ranks())
