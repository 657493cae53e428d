"""The plan of a call: which ranks it takes, and whether it tries strategies while it runs."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from comfy_modules import import_comfyui_here
from jobs import FP8, flux_job
from pack_nodes import import_node_module
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.history import record_run
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import ModelSpec, RunInfo
from parallel_backend.sidecar import pool
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import NO_TRIALS
from parallel_backend.wire.cache_folder import VARIABLE

ONE, ULYSSES = ParallelStrategy(), ParallelStrategy(ulysses_degree=2)
CPUS = ("cpu:0", "cpu:1")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The module nodes.host.calls in a ComfyUI without settings, measurements and ranks."""
    import_comfyui_here()
    import folder_paths

    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path / "user"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(measurement_history, "JOBS", Counter())
    return import_node_module("nodes.host.calls")


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_one_device_runs_on_ranks_that_are_warm_for_its_model(calls, monkeypatch, mode):
    """Otherwise the warm ranks would end for one new rank, and start again for the next prompt that uses them all."""
    job = flux_job(FP8)
    for strategy, seconds in ((ONE, 1.0), (ULYSSES, 2.0)):
        record_run(CPUS, job, RunInfo("native", strategy, (9.0, seconds)))

    def devices(*warm, models=()):
        ranks = SimpleNamespace(devices=warm, models=models) if warm else None
        monkeypatch.setattr(pool, "running_within", lambda devices: ranks)
        plan = calls.plan_job(StrategySettings(mode, "cpu:2", ONE), job)
        assert plan.strategy == ONE
        return plan.devices

    held = (ModelSpec(job.model.file.path),)
    assert devices() == ("cpu:0",)
    assert devices(*CPUS, models=held) == (CPUS if mode == "auto" else ("cpu:0",))
    assert devices(*CPUS, models=(ModelSpec("/models/another.safetensors"),)) == ("cpu:0",)
    assert devices("cpu:1", models=held) == ("cpu:0",)


def test_by_hand_ranks_are_as_many_for_a_call_to_which_the_degrees_mean_nothing(calls, monkeypatch):
    """An example is a call without the negative prompt, if only CFG can split the model: the next call may use all."""
    job = flux_job(FP8)
    alone = calls.plan_job(StrategySettings("manual", "cpu:4", ONE), job)
    monkeypatch.setattr(calls, "plan_execution", lambda *args, **options: alone)
    by_hand = StrategySettings("manual", "cpu:4", ParallelStrategy(cfg_degree=2))
    assert alone.devices == ("cpu:0",)
    for make in (calls.plan_job, calls.plan_by_rule):  # a preload is planned by rule
        plan = make(by_hand, job)
        assert plan.strategy == ONE and plan.devices == CPUS


def test_a_first_job_tries_strategies_unless_the_setting_says_otherwise(calls, tmp_path):
    """Without trials two first jobs use the same strategy, and so give the same bits."""
    settings = tmp_path / "user" / "default" / "comfy.settings.json"
    settings.parent.mkdir(parents=True)
    job = flux_job(FP8, width=64, height=64, text=16, steps=20)

    def plan(found):
        settings.write_text(json.dumps(found))
        return calls.plan_job(StrategySettings(devices="cpu:2"), job)

    one, other = (plan({"parallel_sampling.try_strategies": False}) for _ in range(2))
    assert one.trials == other.trials == NO_TRIALS and one.strategy == other.strategy == ULYSSES
    assert plan({}).trials.strategies
