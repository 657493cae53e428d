"""`compile: auto`: never on a CPU or an old card, and on new ones as soon as compiling would have paid."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fake_nvml
from jobs import BF16, flux_file
from parallel_backend.machine.local import NO_GPUS
from parallel_backend.machine.probe import read_topology
from parallel_backend.models.comfyui.model_file import TYPICAL
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.compile_choice import CompileChoice
from parallel_backend.planner.decide import job_from_latent
from parallel_backend.planner.job_models import CheckpointModel

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


def test_what_a_person_chose_stays(pair):
    for mode in ("off", "blocks"):
        job = _job(mode)
        assert CompileChoice().settle(job, PAIR, pair) == (job, "")


def test_on_a_cpu_nothing_is_compiled():
    job, told = CompileChoice().settle(_job(steps=100_000), ("cpu:0", "cpu:1"), NO_GPUS)
    assert (_mode(job), told) == ("off", "")


def test_below_ampere_and_where_nobody_knows_nothing_is_compiled(pair):
    older, newer = pair.devices
    mixed = replace(pair, devices=(replace(older, capability=(7, 5)), newer))
    job, told = CompileChoice().settle(_job(steps=100_000), PAIR, mixed)
    assert _mode(job) == "off" and "compute capability 7.5, and it takes 8.0" in told
    rocm = replace(pair, source="torch")
    job, told = CompileChoice().settle(_job(steps=100_000), PAIR, rocm)
    assert _mode(job) == "off" and "ROCm" in told


def test_a_long_job_is_compiled_and_a_short_one_is_not(pair):
    long, told = CompileChoice().settle(_job(steps=2_000, side=256), PAIR, pair)
    assert _mode(long) == "blocks" and told.startswith("compile: auto compiles: compiling takes about 60 s")
    short, told = CompileChoice().settle(_job(steps=4), PAIR, pair)
    assert _mode(short) == "off" and "left the blocks as they are" in told


def test_short_jobs_are_compiled_once_those_before_would_have_paid_for_it(pair):
    choice, modes = CompileChoice(), []
    while "blocks" not in modes and len(modes) < 1_000:
        job, told = choice.settle(_job(), PAIR, pair)
        modes.append(_mode(job))
    assert 1 < len(modes) < 1_000 and "s of those before" in told
    assert _mode(choice.settle(_job(steps=1), PAIR, pair)[0]) == "blocks"  # what was compiled is there
    other = _job()
    other = replace(other, model=replace(other.model, weight_dtype="float8_e4m3fn"))
    assert _mode(choice.settle(other, PAIR, pair)[0]) == "off"  # another model's blocks


def test_blocks_that_nobody_described_are_not_compiled(pair):
    job = job_from_latent(
        CheckpointModel(replace(TYPICAL, splits_tokens=False), compute_options=ComputeOptions("auto")),
        (1, 16, 256, 256),
        text=512,
        has_cfg=False,
        steps=2_000,
    )
    settled, told = CompileChoice().settle(job, PAIR, pair)
    assert (_mode(settled), told) == ("off", "")
