"""What a call in ComfyUI's own loop leaves of a trial: a crash counts against its strategy, a cancel does not."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from comfy_modules import import_comfyui_here
from jobs import FP8, flux_file
from pack_nodes import import_node_module
from parallel_backend.errors import Cancelled, OutOfMemory, RankFailed, RequestError
from parallel_backend.machine.cache_files import VARIABLE
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner import plan as decide  # noqa: F401  the module under test must meet these very ones
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import ModelSpec, RunInfo
from parallel_backend.sidecar import pool
from parallel_backend.strategy import ParallelStrategy

ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
ONE = ParallelStrategy()
STEPS = 20


@pytest.fixture(scope="module")
def comfyui():
    import_comfyui_here()
    return import_node_module("nodes.model.plans")


@pytest.fixture
def plans(comfyui, tmp_path, monkeypatch):
    """RunPlans of a model on two devices of which nothing was measured, without ranks."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(measurement_history, "GIVEN_UP", set())
    monkeypatch.setattr(measurement_history, "JOBS", Counter())
    monkeypatch.setattr(pool, "get_sidecar", lambda devices: None)
    return comfyui.RunPlans(ModelSpec("/models/flux.safetensors"), flux_file(FP8))


def begin(plans, steps=STEPS):
    """`call(error)` of a new run: the strategy of one model call, which raises `error` where there is one."""
    options = {
        "sample_sigmas": torch.linspace(1, 0, steps + 1),
        import_node_module("nodes.model.options").SETTINGS: StrategySettings(devices="cpu:2"),
    }

    def call(error=None):
        seen = []

        def on_ranks(sidecar, placement):
            seen.append(placement.strategy)
            if error is not None:
                raise error
            return None, RunInfo("native", placement.strategy, (1.0,))

        if error is None:
            plans.run(options, (1, 16, 8, 8), 16, on_ranks)
        else:
            with pytest.raises(Exception, match="on purpose"):
                plans.run(options, (1, 16, 8, 8), 16, on_ranks)
        return seen[0]

    return call


@pytest.mark.parametrize(
    "error", [Cancelled("on purpose"), RequestError("on purpose")], ids=["cancel", "refusal"]
)
def test_a_cancelled_or_refused_call_in_a_trial_says_nothing_of_its_strategy(plans, error):
    call = begin(plans)
    assert [call() for _ in range(4)] == [ONE] * 4
    assert call(error) == ULYSSES
    assert call() == ULYSSES  # the trial goes on
    again = begin(plans)
    assert [again() for _ in range(5)] == [ONE] * 4 + [ULYSSES]


@pytest.mark.parametrize(
    "error", [RankFailed(1, "on purpose"), OutOfMemory("on purpose")], ids=["crash", "memory"]
)
def test_a_call_that_crashed_or_ran_out_of_memory_in_a_trial_ends_it_and_is_not_tried_again(plans, error):
    call = begin(plans)
    assert [call() for _ in range(4)] == [ONE] * 4
    assert call(error) == ULYSSES
    assert [call() for _ in range(STEPS - 5)] == [ONE] * (STEPS - 5)
    again = begin(plans)
    assert [again() for _ in range(5)] == [ONE] * 4 + [RING]
    assert ULYSSES not in [again() for _ in range(STEPS - 5)]


def test_a_crash_outside_of_a_trial_counts_against_nothing(plans):
    call = begin(plans)
    assert call(RankFailed(1, "on purpose")) == ONE
    assert [call() for _ in range(5)] == [ONE] * 4 + [ULYSSES]


def test_a_run_ends_under_the_fastest_and_the_next_one_knows(plans):
    call = begin(plans)
    assert [call() for _ in range(4 + 3 + 3)] == [ONE] * 4 + [ULYSSES] * 3 + [RING] * 3
    assert {call() for _ in range(STEPS - 10)} == {ONE}
    again = begin(plans)
    assert {again() for _ in range(STEPS)} == {ULYSSES}  # of equals the rule's
    assert not plans.latest.trials
    assert {c.strategy for c in plans.latest.candidates if c.step_s} == {ULYSSES, RING, ONE}


def test_a_run_too_short_to_try_anything_leaves_its_own_time(plans):
    call = begin(plans, steps=12)
    assert {call() for _ in range(12)} == {ONE}
    begin(plans, steps=12)()
    assert [c.strategy for c in plans.latest.candidates if c.step_s] == [ONE]


def test_what_patches_hold_is_part_of_what_a_call_is_planned_with(plans):
    options = {import_node_module("nodes.model.options").SETTINGS: StrategySettings(devices="cpu:2")}
    found = []

    def call(sidecar, placement):
        return None, RunInfo("native", placement.strategy, (1.0,))

    for size in (0, 0, 3 * 2**20):
        found.append(plans.run(options, (1, 16, 8, 8), 16, call, patch_bytes=size)[1])
    assert found[0] is found[1] is not found[2]
    assert found[2].memory.weights - found[0].memory.weights == 3 * 2**20
