"""The traffic benchmark has for each of its strategies a closed form to compare the counted bytes with."""

import pytest
from traffic import FLUX_DEV_JOB, STRATEGIES, _expected, _name

EACH_SENDS = [strategy for strategy, _ in STRATEGIES if strategy.pipefusion_degree == 1]


@pytest.mark.parametrize(("strategy", "cfg"), STRATEGIES, ids=lambda value: getattr(value, "describe", str)())
def test_each_strategy_has_a_closed_form(strategy, cfg):
    bytes_sent = [
        _expected(strategy, rank, FLUX_DEV_JOB, rows=1 + (cfg != 1.0)) for rank in range(strategy.world_size)
    ]
    assert max(bytes_sent) > 0
    assert len(set(bytes_sent)) == 1 or strategy not in EACH_SENDS, _name(strategy)
