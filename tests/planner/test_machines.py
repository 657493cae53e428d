"""Strategies over several machines: the ones that `auto` chooses, and notes on those that are set by hand."""

import pytest

from jobs import BF16, flux_job
from parallel_backend.layout import crosses_machines
from parallel_backend.machine.local import LocalMachine
from parallel_backend.planner.plan import plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.strategy import ParallelStrategy

FOUR = tuple(f"cpu:{i}@lab/{machine}" for machine in "ab" for i in (0, 1))
HERE = tuple(f"cpu:{i}" for i in range(4))
CROSSES = "crosses machines"


def auto(devices, **job):
    return plan_execution(StrategySettings(), flux_job(BF16, **job), LocalMachine(devices), None)


@pytest.mark.parametrize(
    ("devices", "job", "expected"),
    [
        (FOUR, {"prompts": 2}, ParallelStrategy(cfg_degree=2, ulysses_degree=2)),
        (FOUR, {"batch": 2}, ParallelStrategy(data_degree=2, ulysses_degree=2)),
        (FOUR, {}, ParallelStrategy(ulysses_degree=2)),  # one image without CFG stays on one machine
        (HERE, {}, ParallelStrategy(ulysses_degree=4)),  # the control: the same job on one machine
        (FOUR[::2], {}, ParallelStrategy()),
        (FOUR[::2], {"prompts": 2}, ParallelStrategy(cfg_degree=2)),
        (FOUR[1:], {"prompts": 2}, ParallelStrategy(cfg_degree=2)),  # one GPU on a, two on b
    ],
)
def test_auto_keeps_tokens_and_layers_inside_a_machine(devices, job, expected):
    plan = auto(devices, **job)
    assert plan.strategy == expected
    assert plan.devices == devices[: expected.world_size]
    assert not any(crosses_machines(candidate.strategy, devices) for candidate in plan.candidates)


def test_by_hand_everything_runs_and_is_remarked_on():
    def notes(strategy, devices):
        settings = StrategySettings("manual", strategy=strategy)
        return plan_execution(settings, flux_job(BF16, prompts=2), LocalMachine(devices), None).notes

    across = ParallelStrategy(ulysses_degree=4)
    assert any(CROSSES in note for note in notes(across, FOUR))
    assert not any(CROSSES in note for note in notes(across, HERE))
    inside = ParallelStrategy(cfg_degree=2, ulysses_degree=2)
    assert not any(CROSSES in note for note in notes(inside, FOUR))


@pytest.mark.parametrize(
    ("strategy", "crosses"),
    [
        (ParallelStrategy(data_degree=2, cfg_degree=2), False),
        (ParallelStrategy(pipefusion_degree=4), False),
        (ParallelStrategy(cfg_degree=2, ring_degree=2), False),
        (ParallelStrategy(tensor_degree=4), True),
        (ParallelStrategy(ring_degree=2, ulysses_degree=2), True),
    ],
)
def test_what_is_exchanged_in_each_block_decides(strategy, crosses):
    assert crosses_machines(strategy, FOUR) == crosses
    assert not crosses_machines(strategy, HERE)
