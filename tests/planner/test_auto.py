"""`auto` follows a machine's measurements: runs are stored with what affects their time, and the fastest is chosen."""

from dataclasses import replace

import pytest

import fake_nvml
from jobs import FP8, flux_file, flux_job
from parallel_backend.machine.local import LocalMachine
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.options import CompileStats, ComputeOptions
from parallel_backend.planner import history as module
from parallel_backend.planner.history import MeasurementHistory, record_run
from parallel_backend.planner.plan import plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import NO_TRIALS, SWITCH_CPU, Trial
from parallel_backend.wire.cache_folder import VARIABLE

ONE, ULYSSES, CFG = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)
RING = ParallelStrategy(ring_degree=2)
CPUS = ("cpu:0", "cpu:1")


def job(**changes):
    return flux_job(FP8, **{"text": 16, "steps": 20} | changes)


def plan(history, what, engine="auto", **options):
    """Returns the plan for the devices of `history`; the memory of GPUs is unknown here."""
    return plan_execution(
        StrategySettings(engine=engine), what, LocalMachine(history.devices), history, **options
    )


def chosen(*arguments, **options):
    return plan(*arguments, **options).strategy


def run(strategy, seconds, engine="native"):
    return RunInfo(engine, strategy, step_seconds=(9.0, seconds, seconds))


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return MeasurementHistory(("cuda:0", "cuda:1"), read_topology(fake_nvml.two_4090(), sys_root=tmp_path))


@pytest.fixture
def cpus(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    return MeasurementHistory(CPUS, Topology((), source="none"))


def test_another_model_dtype_engine_sampler_size_or_device_is_another_matter(gpus, tmp_path):
    gpus.record(job(), run(ONE, 0.1))
    gpus.record(job(), run(ULYSSES, 9.0))
    assert chosen(gpus, job()) == ONE
    swapped = MeasurementHistory(("cuda:1", "cuda:0"), read_topology(fake_nvml.two_4090(), sys_root=tmp_path))
    smaller = replace(flux_file(FP8), tensor_bytes=11_800_000_000)
    for other in (
        chosen(gpus, replace(job(), model=CheckpointModel(smaller))),
        chosen(gpus, job(weight_dtype="float8_e4m3fn")),
        chosen(gpus, job(), engine="xfuser"),
        chosen(swapped, job()),
        chosen(gpus, job(model_calls=2)),
        chosen(gpus, job(width=512)),
        chosen(gpus, job(reference_tokens=4096)),
    ):
        assert other == ULYSSES
    assert chosen(gpus, job(prompts=2)) == CFG


def test_compiled_and_uncompiled_times_and_those_of_kernels_are_kept_apart(gpus):
    compiled = ComputeOptions("blocks")
    gpus.record(job(), run(ONE, 0.1))

    def measured(options):
        found = plan(gpus, job(compute_options=options)).candidates
        return [c.strategy for c in found if c.step_s is not None]

    assert measured(compiled) == [ONE]  # no compiled run is stored, so uncompiled ones count
    gpus.record(job(compute_options=compiled), replace(run(ULYSSES, 0.2), compiled=CompileStats(0, 0.0, 0)))
    assert measured(ComputeOptions()) == [ONE] and measured(compiled) == [ULYSSES]
    assert measured(ComputeOptions(attention="sage")) == []
    # A run whose blocks were not compiled counts as uncompiled: there may be no compiler.
    gpus.record(job(compute_options=compiled), run(RING, 0.7))
    assert len(measured(ComputeOptions())) == 2


def test_a_job_that_tried_strategies_teaches_the_next_one(cpus):
    assert plan(cpus, job()).trials == NO_TRIALS, "unless it may try"
    first = plan(cpus, job(), tries=True)
    assert first.strategy == ONE and first.trials.strategies == (ULYSSES, RING)
    assert {other.switch_s for other in first.trials.candidates} == {SWITCH_CPU}
    assert first.devices == CPUS  # the second rank is needed for the trials
    assert first.reason == (
        "one device: processes on a CPU share its cores, so Ulysses 2 must show first that it gains"
    )
    trials = (Trial(ONE, (1.6, 1.7, 1.8)), Trial(ULYSSES, (1.0, 1.2, 1.1)), Trial(RING, (0.8, 0.8)))
    assert cpus.record(job(), RunInfo("native", RING, (9.0, 1.0), trials=trials))
    second = plan(cpus, job(), tries=True)
    assert second.strategy == RING and second.trials == NO_TRIALS
    assert second.reason.endswith("a step takes Ring 2 0.8 s, Ulysses 2 1.1 s, one device 1.7 s")


@pytest.mark.parametrize(
    "info",
    [
        RunInfo("native", ONE, step_seconds=(1.0,)),
        RunInfo("native", ONE, step_seconds=(1.0, 0.1, 0.1), model_calls=3, reused_calls=2),
    ],
    ids=["one step", "model calls were reused"],
)
def test_a_run_without_a_warm_step_that_computes_says_nothing(cpus, info):
    assert not cpus.record(job(), info)


def test_remembering_never_costs_a_finished_picture(monkeypatch):
    monkeypatch.setattr(module, "visible_topology", lambda: 1 / 0)
    record_run(CPUS, job(), run(ONE, 1.0))
