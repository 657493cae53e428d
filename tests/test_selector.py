"""The rule "CFG, then Ulysses, then Ring", its reasons, and conflicts resolved so that no device idles."""

import pytest

from parallel_backend.errors import StrategyError
from parallel_backend.selector import StrategyChoice, resolve
from parallel_backend.strategy import ModelShape, ParallelStrategy, RequestShape

FLUX = ModelShape(heads=24, blocks=57)
PLAIN = RequestShape(batch=1, has_cfg=False)
WITH_CFG = RequestShape(batch=1, has_cfg=True)


def _devices(count):
    return tuple(f"cpu:{i}" for i in range(count))


@pytest.mark.parametrize(
    ("count", "request_shape", "heads", "expected"),
    [
        (1, PLAIN, 24, ParallelStrategy()),
        (1, WITH_CFG, 24, ParallelStrategy()),
        (2, PLAIN, 24, ParallelStrategy(ulysses_degree=2)),
        (2, WITH_CFG, 24, ParallelStrategy(cfg_degree=2)),
        (3, WITH_CFG, 24, ParallelStrategy(ulysses_degree=3)),
        (4, WITH_CFG, 24, ParallelStrategy(cfg_degree=2, ulysses_degree=2)),
        (4, PLAIN, 24, ParallelStrategy(ulysses_degree=4)),
        (2, PLAIN, 3, ParallelStrategy(ring_degree=2)),
        (4, PLAIN, 2, ParallelStrategy(ulysses_degree=2, ring_degree=2)),
        (5, PLAIN, 24, ParallelStrategy(ring_degree=5)),
        (8, PLAIN, 24, ParallelStrategy(ulysses_degree=8)),
    ],
)
def test_auto_follows_the_rule(count, request_shape, heads, expected):
    decision = resolve(StrategyChoice(), ModelShape(heads=heads, blocks=2), request_shape, _devices(count))
    assert decision.strategy == expected
    assert decision.reason
    assert not decision.strategy.violations(ModelShape(heads=heads, blocks=2), count)


def test_the_reason_says_why_ring_was_needed():
    decision = resolve(StrategyChoice(), ModelShape(heads=3, blocks=2), PLAIN, _devices(2))
    assert "3 attention heads" in decision.reason


def test_a_manual_strategy_is_taken_as_it_is():
    choice = StrategyChoice("manual", "all", ParallelStrategy(ring_degree=2, ulysses_degree=2), "native")
    decision = resolve(choice, FLUX, PLAIN, _devices(4))
    assert decision.strategy == choice.strategy
    assert decision.engine == "native"
    assert decision.notes == ()


def test_a_manual_strategy_that_breaks_a_rule_is_refused():
    choice = StrategyChoice("manual", "all", ParallelStrategy(ulysses_degree=4))
    with pytest.raises(StrategyError, match="needs 4 devices and 1 is selected"):
        resolve(choice, FLUX, PLAIN, _devices(1))


def test_cfg_degree_without_cfg_moves_to_the_sequence_and_says_so():
    choice = StrategyChoice("manual", "all", ParallelStrategy(cfg_degree=2, ulysses_degree=2))
    decision = resolve(choice, FLUX, PLAIN, _devices(4))
    assert decision.strategy == ParallelStrategy(ulysses_degree=4)
    assert "cfg 1.0" in decision.notes[0]


def test_data_degree_beyond_the_batch_moves_to_the_sequence():
    choice = StrategyChoice("manual", "all", ParallelStrategy(data_degree=2))
    decision = resolve(choice, ModelShape(heads=3, blocks=2), PLAIN, _devices(2))
    assert decision.strategy == ParallelStrategy(ring_degree=2)
    assert "1 image" in decision.notes[0]


def test_idle_devices_are_mentioned():
    decision = resolve(StrategyChoice("manual", "all", ParallelStrategy()), FLUX, PLAIN, _devices(3))
    assert "2 of the 3 selected devices stay idle" in decision.notes[0]


@pytest.mark.parametrize("bad", [{"mode": "magic"}, {"engine": "magic"}])
def test_unknown_words_are_refused_when_the_choice_is_made(bad):
    with pytest.raises(StrategyError, match="magic"):
        StrategyChoice(**bad)
