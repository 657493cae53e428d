"""The rule "CFG, then Ulysses, then Ring", its reasons, and conflicts resolved so that no device idles."""

from dataclasses import replace

import pytest

from jobs import flux_file, flux_job
from parallel_backend.errors import StrategyError
from parallel_backend.models.diffusers.keys import FLUX_DEV
from parallel_backend.planner.rules import StrategySettings, resolve_strategy
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ModelShape, ParallelStrategy


def _job(prompts=1, heads=24):
    """Returns a job of a model with two blocks."""
    dims = replace(FLUX_DEV, heads=heads, double_blocks=1, single_blocks=1)
    return Job(CheckpointModel(flux_file(dims=dims)), prompts=prompts)


def _devices(count):
    return tuple(f"cpu:{i}" for i in range(count))


@pytest.mark.parametrize(
    ("count", "prompts", "heads", "expected"),
    [
        (1, 1, 24, ParallelStrategy()),
        (1, 2, 24, ParallelStrategy()),
        (2, 1, 24, ParallelStrategy(ulysses_degree=2)),
        (2, 2, 24, ParallelStrategy(cfg_degree=2)),
        (3, 2, 24, ParallelStrategy(ulysses_degree=3)),
        (4, 2, 24, ParallelStrategy(cfg_degree=2, ulysses_degree=2)),
        (4, 1, 24, ParallelStrategy(ulysses_degree=4)),
        (2, 1, 3, ParallelStrategy(ulysses_degree=2)),
        (2, 1, 1, ParallelStrategy(ring_degree=2)),
        (4, 1, 2, ParallelStrategy(ulysses_degree=2, ring_degree=2)),
        (5, 1, 24, ParallelStrategy(ulysses_degree=5)),
        (8, 1, 24, ParallelStrategy(ulysses_degree=8)),
    ],
)
def test_auto_follows_the_rule(count, prompts, heads, expected):
    decision = resolve_strategy(StrategySettings(), _job(prompts, heads), _devices(count))
    assert decision.strategy == expected
    assert expected.ring_degree == 1 or f"{heads} attention head" in decision.reason
    assert decision.reason
    assert not decision.strategy.violations(ModelShape(heads=heads, blocks=2), count)


def _manual(count, shares="", job=None, **degrees):
    settings = StrategySettings("manual", "all", ParallelStrategy(**degrees), device_shares=shares)
    return resolve_strategy(settings, job or flux_job(), _devices(count))


def test_a_manual_strategy_is_taken_as_it_is():
    settings = StrategySettings("manual", "all", ParallelStrategy(ring_degree=2, ulysses_degree=2), "native")
    decision = resolve_strategy(settings, flux_job(), _devices(4))
    assert (decision.strategy, decision.engine, decision.notes) == (settings.strategy, "native", ())


def test_a_manual_strategy_that_breaks_a_rule_is_refused():
    with pytest.raises(StrategyError, match="needs 4 devices; 1 is selected"):
        _manual(1, ulysses_degree=4)


@pytest.mark.parametrize(
    ("useless", "beside", "expected"),
    [
        ("cfg_degree", {"ulysses_degree": 2}, {"ulysses_degree": 4}),
        ("cfg_degree", {"pipefusion_degree": 2}, {"pipefusion_degree": 2, "ulysses_degree": 2}),
        ("data_degree", {"pipefusion_degree": 2}, {"pipefusion_degree": 2, "ulysses_degree": 2}),
    ],
)
def test_a_degree_without_work_moves_to_the_sequence_and_says_so(useless, beside, expected):
    decision = _manual(4, **{useless: 2}, **beside)
    assert decision.strategy == ParallelStrategy(**expected)
    assert f"so {useless} 2 would idle" in decision.notes[0]
    assert {"cfg_degree": "cfg 1.0", "data_degree": "1 image"}[useless] in decision.notes[0]


def test_a_degree_without_work_moves_to_the_ring_where_heads_are_too_few():
    assert _manual(2, job=_job(heads=1), data_degree=2).strategy == ParallelStrategy(ring_degree=2)


def test_idle_devices_are_mentioned():
    assert "2 of the 3 selected devices have nothing to do" in _manual(3).notes[0]


def test_fewer_patches_than_stages_are_remarked_on():
    assert "3 or more keep all busy" in _manual(3, pipefusion_degree=3, num_pipeline_patch=2).notes[0]


def test_shares_reach_the_strategy_in_both_modes():
    assert _manual(2, "3,1", ring_degree=2).strategy.device_shares == (3, 1)
    assert _manual(3, "3,1,1", ring_degree=2).strategy.device_shares == (3, 1)
    automatic = resolve_strategy(StrategySettings(device_shares="3,1"), flux_job(), _devices(2))
    assert automatic.strategy == ParallelStrategy(ulysses_degree=2, device_shares=(3, 1))


def test_shares_that_change_nothing_are_dropped_and_said():
    with_cfg = resolve_strategy(StrategySettings(device_shares="3,1"), flux_job(prompts=2), _devices(2))
    assert with_cfg.strategy == ParallelStrategy(cfg_degree=2)
    assert "device_shares changes nothing for CFG 2" in with_cfg.notes[0]
