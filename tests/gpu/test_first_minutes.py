"""The checks of the GPU check on this machine's GPUs, one test for each, and further tests that need a GPU."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from parallel_backend.commands.gpu_check.ranks import Ranks
from parallel_backend.commands.gpu_check.run import choose, make_subject, run_checks
from parallel_backend.devices import resolve_devices
from parallel_backend.observability.gauges import read_gauges
from parallel_backend.planner.plan import job_from_request
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.memory import predict_memory
from parallel_backend.requests import Placement
from parallel_backend.wire.calibration import POINT_TO_POINT, slowest_rate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none"),
]
MODEL = os.environ.get("PARALLEL_SAMPLING_GPU_MODEL", "")  # a Flux.1 checkpoint; the demo model if empty
SETTLED = 2.0  # seconds in which the driver frees the memory of a killed process
CONTEXT = 300e6  # bytes that other programs may allocate meanwhile


def _subject():
    return make_subject(resolve_devices("all"), MODEL)


@pytest.fixture
def ranks(no_leaks):
    held = Ranks(_subject())
    yield held
    held.close()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("check", [check.name for _, check in choose(())])
def test_a_check_finds_nothing_broken(check, no_leaks):
    subject = _subject()
    ((_, wanted),) = choose((check,))
    if reason := wanted.why_not(subject):
        pytest.skip(reason)
    report = run_checks(subject, choose((check,)))
    assert report.exit_status == 0, report.as_markdown()


def test_this_process_stays_without_a_context_of_cuda(ranks):
    """ComfyUI's process, or a server that forks ranks, must not touch a GPU to start ranks or send them requests."""
    ranks.sample()
    assert not torch.cuda.is_initialized()


def test_memory_is_back_two_seconds_after_a_kill(ranks):
    device = ranks.subject.devices[:1]
    before = read_gauges(device)[device[0]].free_bytes
    if not before:
        pytest.skip("NVML does not answer")
    ranks.sample()
    os.kill(ranks.group(1).pids[0], signal.SIGKILL)
    deadline = time.monotonic() + SETTLED
    while read_gauges(device)[device[0]].free_bytes < before - CONTEXT:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_memory_while_sampling_is_as_predicted(ranks):
    ranks.sample()
    (rank,) = ranks.memory(1)
    job = job_from_request(CheckpointModel(ranks.file), ranks.request())
    (predicted,) = predict_memory(job, Placement().strategy)
    assert rank.weight_bytes == pytest.approx(predicted.weights, rel=0.05)
    assert rank.weight_bytes + rank.working_bytes <= predicted.private_bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_calibration_is_repeatable_and_short(ranks):
    sidecar, placement = ranks.group(2), Placement(ranks.split())
    sidecar.calibrate(placement)  # makes the communicators
    runs = [sidecar.calibrate(placement) for _ in range(2)]
    one, other = (slowest_rate(run, POINT_TO_POINT) for run in runs)
    assert one == pytest.approx(other, rel=0.03)
    assert all(rank.seconds < 2.5 for run in runs for rank in run)
