"""The report's words on the strategies that a first job tried, for different plans and step times."""

from collections import Counter
from dataclasses import replace

import pytest

import fake_nvml
from jobs import FP8, flux_job
from pack_nodes import import_node_module, module_fixture
from parallel_backend.machine.cards import CARDS
from parallel_backend.machine.local import LocalMachine
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.history import MeasurementHistory
from parallel_backend.planner.plan import plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.step_bounds import lower_bound
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import TrialRun
from parallel_backend.wire.cache_folder import VARIABLE

ONE, ULYSSES, RING = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
GROUPS_2 = ULYSSES.replace(head_groups=2)
TOKENS = GROUPS_2.replace(sends_tokens=True)
DATA = ParallelStrategy(data_degree=2)
TINY = {"width": 64, "height": 64, "text": 16, "steps": 20}


calls = module_fixture("nodes.host.calls")


@pytest.fixture
def report(calls, tmp_path, monkeypatch):
    """Returns `report(times, gpus, **job)`: the lines on a first job. `times`: seconds of a step, by strategy."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(measurement_history, "GIVEN_UP", set())
    monkeypatch.setattr(measurement_history, "JOBS", Counter())

    def write(times, gpus=False, **asked):
        devices = ("cuda:0", "cuda:1") if gpus else ("cpu:0", "cpu:1")
        seen = read_topology(fake_nvml.two_4090(), sys_root=tmp_path) if gpus else Topology((), source="none")
        job = flux_job(FP8, **asked)
        history = MeasurementHistory(devices, seen)
        plan = plan_execution(StrategySettings(), job, LocalMachine(devices), history, tries=True)
        run, seconds = TrialRun(plan.strategy, plan.trials, job.steps), []
        for _ in range(job.steps):
            seconds.append(times[run.strategy])
            run.took(seconds[-1])
        record = calls.RunRecord()
        record.add_run(plan, RunInfo("native", run.strategy, tuple(seconds), trials=run.results))
        return import_node_module("nodes.runs.report").write_report(record).splitlines()

    return write


def test_the_fastest_and_what_it_won_is_said(report):
    lines = report({ULYSSES: 0.033, RING: 0.034, ONE: 0.055}, **TINY)
    assert lines[0].startswith(
        "strategy: Ulysses 2: the fastest of those tried in this run, which began with one device: processes on a CPU "
    )
    assert (
        "tried: a step took one device 0.055 s, Ulysses 2 0.033 s, Ring 2 0.034 s; Ulysses 2 ran the rest, 1.7 "
        "times as fast as one device; kept for the next runs"
    ) in lines
    assert not [line for line in lines if line.startswith("not tried")]


def test_one_device_that_wins_a_tiny_job_on_gpus_is_said_plainly(report):
    (line,) = [
        x
        for x in report({ULYSSES: 5.5, GROUPS_2: 3.4, TOKENS: 3.5, ONE: 3.3}, gpus=True, steps=50)
        if x.startswith("tried")
    ]
    assert (
        "one device, for which splitting this work costs more than it gains, ran the rest, 1.7 times as fast as "
        "Ulysses 2"
    ) in line


def test_where_the_first_one_wins_nothing_else_is_claimed(report):
    (line,) = [x for x in report({ULYSSES: 1.6, RING: 1.01, ONE: 1.0}, **TINY) if x.startswith("tried")]
    assert "none was faster than one device, with which it began; behind, or failed: Ulysses 2" in line


def test_one_image_over_all_devices_wins_a_batch_by_images_a_second_where_it_is_faster(report):
    lines = report({ULYSSES: 1.6, DATA: 2.0, RING: 1.9, ONE: 2.1}, batch=2, **TINY)
    assert "which began with data 2: each device takes whole images, which is no more work than" in lines[0]
    (line,) = [x for x in lines if x.startswith("tried")]
    assert line.startswith("tried: a step of 2 images took data 2 2 s, one device 2.1 s, Ulysses 2 1.6 s")
    assert "Ulysses 2 ran the rest, 1.2 times the images a second of data 2" in line


LEFT = "finding out might cost more than 3% of this job; a longer one, later ones or bench will tell"


def test_what_a_short_job_cannot_afford_to_try_is_named(report):
    assert f"not tried: Ulysses 2, Ring 2 ({LEFT})" in report({ONE: 1.0}, **TINY | {"steps": 4})
    # By arithmetic one GPU takes up to twice as long as two: too much for a trial in 28 steps, but not in 50.
    times = {ULYSSES: 6.0, GROUPS_2: 6.0, TOKENS: 6.0, ONE: 11.0}
    assert f"not tried: one device ({LEFT})" in report(times, gpus=True)
    assert not [line for line in report(times, gpus=True, steps=50) if line.startswith("not tried")]


def test_what_cannot_be_faster_by_the_data_sheet_is_named_as_such(report):
    step_s = 0.9 * lower_bound(flux_job(FP8), ONE, CARDS["rtx4090"])
    lines = report(dict.fromkeys((ULYSSES, GROUPS_2, TOKENS), step_s), gpus=True, steps=90)
    assert "not tried: one device (these GPUs' data sheet says it cannot be faster)" in lines


def test_nothing_is_said_where_nothing_was_to_be_tried(calls, report):
    plan = plan_execution(StrategySettings(), flux_job(FP8), LocalMachine(("cpu:0", "cpu:1")), None)
    record = calls.RunRecord()
    record.add_run(replace(plan, candidates=()), RunInfo("native", ULYSSES, (1.0, 1.0)))
    assert "tried" not in import_node_module("nodes.runs.report").write_report(record)
