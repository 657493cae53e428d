"""`compile: auto` never compiles on a CPU or an old card, and on new ones as soon as it would have paid."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fake_nvml
from jobs import BF16, flux_file
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.models.comfyui.model_file import TYPICAL
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.compile_choice import COMPILE_SECONDS, SAVED_SHARE, CompileChoice
from parallel_backend.planner.history import MeasurementHistory
from parallel_backend.planner.plan import job_from_latent
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.requests import ROWS, CompileStats, RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import VARIABLE

PAIR = ("cuda:0", "cuda:1")


def _job(mode="auto", steps=20, side=128):
    model = CheckpointModel(flux_file(BF16), compute_options=ComputeOptions(mode))
    return job_from_latent(model, (1, 16, side, side), text=512, has_cfg=False, steps=steps)


@pytest.fixture
def pair(tmp_path):
    topology = read_topology(fake_nvml.two_4090(), sys_root=tmp_path)
    assert topology.source == "nvml" and len(topology.devices) == 2
    return topology


def _mode(job):
    return job.model.compute_options.compile


def _settle(job, pair, *history):
    """Returns (the mode that `auto` settles on, what is told) for a job before which no other ran."""
    settled, told = CompileChoice().settle(job, PAIR, pair, *history)
    return _mode(settled), told


def test_what_a_person_chose_stays_and_on_a_cpu_nothing_is_compiled(pair):
    for mode in ("off", "blocks"):
        job = _job(mode)
        assert CompileChoice().settle(job, PAIR, pair) == (job, "")
    job, told = CompileChoice().settle(_job(steps=100_000), ("cpu:0", "cpu:1"), Topology(()))
    assert (_mode(job), told) == ("off", "")


def test_below_ampere_and_where_nobody_knows_nothing_is_compiled(pair):
    older, newer = pair.devices
    mixed = replace(pair, devices=(replace(older, capability=(7, 5)), newer))
    mode, told = _settle(_job(steps=100_000), mixed)
    assert mode == "off" and "compute capability 7.5, and it takes 8.0" in told
    mode, told = _settle(_job(steps=100_000), replace(pair, source="torch"))
    assert mode == "off" and "ROCm" in told


def test_a_long_job_is_compiled_and_a_short_one_is_not(pair):
    mode, told = _settle(_job(steps=2_000, side=256), pair)
    assert mode == "blocks" and told.startswith("compile: auto compiles: compiling takes about 60 s")
    mode, told = _settle(_job(steps=4), pair)
    assert mode == "off" and "left the blocks as they are" in told


def test_short_jobs_are_compiled_once_those_before_would_have_paid_for_it(pair):
    choice, modes = CompileChoice(), []
    while "blocks" not in modes and len(modes) < 1_000:
        job, told = choice.settle(_job(), PAIR, pair)
        modes.append(_mode(job))
    assert 1 < len(modes) < 1_000 and "s of those before" in told
    assert _mode(choice.settle(_job(steps=1), PAIR, pair)[0]) == "blocks"  # blocks are compiled already
    other = _job()
    other = replace(other, model=replace(other.model, weight_dtype="float8_e4m3fn"))
    assert _mode(choice.settle(other, PAIR, pair)[0]) == "off"  # another model has its own blocks to compile


def test_blocks_that_nobody_described_are_not_compiled(pair):
    job = _job(steps=2_000, side=256)
    undescribed = replace(job.model, file=replace(TYPICAL, mode=ROWS))
    assert _settle(replace(job, model=undescribed), pair) == ("off", "")


@pytest.fixture
def history(pair, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return MeasurementHistory(PAIR, pair)


def _seen(history, job, step_s, *, compiled):
    stats = CompileStats(2, 40.0, 0) if compiled else None
    strategy, steps = ParallelStrategy(cfg_degree=2), (step_s,) * 3
    history.record(job, RunInfo("native", strategy, step_seconds=steps, compiled=stats))


def test_a_step_that_was_measured_takes_the_place_of_the_least_one(pair, history):
    steps = 30
    job = _job(steps=steps)
    assert _settle(job, pair, history)[0] == "off"
    slow = 1.01 * COMPILE_SECONDS / (SAVED_SHARE * steps)
    _seen(history, _job("off", steps), slow, compiled=False)
    mode, told = _settle(job, pair, history)
    assert mode == "blocks" and "should save about 60.6 s of this job" in told
    assert _settle(_job(steps=steps, side=64), pair, history)[0] == "off", "of another size"


def test_what_compiled_blocks_saved_here_takes_the_place_of_the_assumption(pair, history):
    job = _job(steps=100)
    _seen(history, _job("off"), 2.0, compiled=False)
    _seen(history, _job("blocks"), 1.3, compiled=True)
    mode, told = _settle(job, pair, history)
    assert mode == "blocks" and "saves about 70.0 s of this job" in told


def test_blocks_that_were_no_faster_compiled_stay_as_they_are(pair, history):
    job = _job(steps=100_000)
    assert _settle(job, pair, history)[0] == "blocks"
    _seen(history, _job("off"), 1.0, compiled=False)
    _seen(history, _job("blocks"), 1.1, compiled=True)
    mode, told = _settle(job, pair, history)
    assert mode == "off" and "no faster here" in told
