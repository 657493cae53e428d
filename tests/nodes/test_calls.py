"""The setting that turns trials off: first runs give the same bits, and with it on the same latent up to rounding."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from comfy_modules import import_comfyui_here
from differences import relative_difference
from jobs import FP8, flux_job
from loop_jobs import loop_job, tiny_model
from pack_nodes import import_node_module
from parallel_backend.commands.bench.rounds import random_request
from parallel_backend.machine.cache_files import VARIABLE
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.history import record_run
from parallel_backend.planner.plan import job_from_request
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.requests import ModelSpec, Placement, RunInfo
from parallel_backend.sidecar import pool
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship
from tiny_flux import write_tiny_flux

STEPS = 20


ONE, ULYSSES = ParallelStrategy(), ParallelStrategy(ulysses_degree=2)
CPUS = ("cpu:0", "cpu:1")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """nodes.host.calls of a ComfyUI without settings, measurements and ranks."""
    import_comfyui_here()
    import folder_paths

    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path / "user"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(measurement_history, "JOBS", Counter())
    return import_node_module("nodes.host.calls")


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_one_device_runs_on_ranks_that_are_warm_for_its_model(calls, monkeypatch, mode):
    """They would end for the sake of one new rank, and start again for the next prompt that wants them all."""
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
    """Such as one without the negative prompt, of a model whose rows alone can be shared out; the next call has it."""
    job = flux_job(FP8)
    alone = calls.plan_job(StrategySettings("manual", "cpu:4", ONE), job)
    monkeypatch.setattr(calls, "plan_execution", lambda *args, **options: alone)
    by_hand = StrategySettings("manual", "cpu:4", ParallelStrategy(cfg_degree=2))
    assert alone.devices == ("cpu:0",)
    for plan in (
        calls.plan_job(by_hand, job),
        calls.plan_by_rule(by_hand, job),
    ):  # the latter also for a preload
        assert plan.strategy == ONE and plan.devices == CPUS


@pytest.fixture
def first_run(two_real_ranks, tmp_path, monkeypatch):
    """`first_run(tries)`: a job on two ranks of which nothing was measured, with the setting as a person left it."""
    import_comfyui_here()
    import folder_paths

    calls = import_node_module("nodes.host.calls")
    file, spec = inspect_flux(write_tiny_flux(tmp_path / "tiny.safetensors")), tiny_model(tmp_path)
    request = random_request(file, width=128, height=128, batch=1, text=8, steps=STEPS, with_cfg=True)
    job = job_from_request(CheckpointModel(file), request)
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path / "user"))
    (tmp_path / "user" / "default").mkdir(parents=True)
    count = 0

    def run(tries):
        nonlocal count
        count += 1
        monkeypatch.setenv(VARIABLE, str(tmp_path / f"kept {count}"))
        monkeypatch.setattr(measurement_history, "GIVEN_UP", set())
        monkeypatch.setattr(measurement_history, "JOBS", Counter())
        settings = tmp_path / "user" / "default" / "comfy.settings.json"
        settings.write_text(json.dumps({} if tries else {"parallel_sampling.try_strategies": False}))
        plan = calls.plan_job(StrategySettings(devices="cpu:2"), job)
        shipped = ship(spec, loop_job(steps=STEPS, size=(16, 16)), trials=plan.trials)
        return two_real_ranks.sample(spec, shipped, Placement(plan.strategy))

    return run


def test_two_first_runs_without_trials_give_equal_bits_and_with_them_the_same_up_to_rounding(first_run):
    one, other, tried = first_run(False), first_run(False), first_run(True)
    assert one.info.trials == other.info.trials == () and len(tried.info.trials) > 1
    assert torch.equal(one.latent, other.latent)
    assert relative_difference(tried.latent, one.latent) <= 1e-5
