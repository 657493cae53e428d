"""Limits of the fault benchmark on a busy machine: limits in seconds are multiplied by its slowness, counts are not."""

import pytest
from fault_cases.case import Check


@pytest.mark.parametrize(
    ("check", "slowness", "passes"),
    [
        (Check("noticed", 0.9, 0.5, timed=True), 1.0, False),
        (Check("noticed", 0.9, 0.5, timed=True), 2.0, True),
        (Check("processes left", 1, 0), 9.0, False),
        (Check("ready", 99.0), 1.0, True),  # without a limit: only measured
    ],
)
def test_a_limit_in_seconds_holds_times_how_slow_the_machine_was(check, slowness, passes):
    assert check.passes(slowness) is passes
