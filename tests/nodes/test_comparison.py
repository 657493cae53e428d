"""The words and numbers of a comparison with one device."""

import pytest

from jobs import flux_job
from pack_nodes import module_fixture
from parallel_backend.planner.rules import Plan
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy

calls = module_fixture("nodes.host.calls")
comparison = module_fixture("nodes.compare")
ONE, SPLIT = (0.9, 0.4, 0.4, 0.5), (0.6, 0.2, 0.2, 0.1)


@pytest.fixture
def compare(calls, comparison):
    """Returns a function that compares runs by the seconds of their steps. `run`: more of the run on all devices."""

    def made(one=ONE, split=SPLIT, *, levels=0, latent_peak=4.0, **run):
        plans = [Plan(flux_job(), ("cpu:0", "cpu:1"), ParallelStrategy())]
        alone = calls.RunRecord(plans, [RunInfo("native", ParallelStrategy(), one)])
        both = calls.RunRecord(plans, [RunInfo("native", ParallelStrategy(ulysses_degree=2), split, **run)])
        return comparison.DeviceComparison(alone, both, levels, latent=2e-6, latent_peak=latent_peak)

    return made


def test_the_headline_tells_strategy_speed_up_both_times_and_the_difference(compare):
    assert compare().headline() == (
        "Ulysses 2 · 2.0 × as fast as one device · 0.2 s instead of 0.4 s per step · largest difference 0 of 255"
    )


def test_the_first_step_of_each_side_does_not_count_for_the_speed_up(compare):
    assert compare().step_seconds == compare(split=(60.0, *SPLIT[1:])).step_seconds == (0.4, 0.2)


def test_the_page_gets_the_two_times_that_the_sentence_is_made_of(compare):
    shown = compare(SPLIT, (9.0, 0.238)).as_dict()
    assert shown["seconds"] == [0.2, 0.238] and shown["compared"] == "16 % slower than one device"


def test_each_side_the_difference_and_whether_it_is_exact_have_a_line(compare):
    assert compare().lines() == [
        "one device: 4 steps in 2.2 s, median 0.4 s",
        "Ulysses 2: 4 steps in 1.1 s, median 0.2 s",
        "speed: 2.0 × as fast as one device (0.2 s instead of 0.4 s per step)",
        "largest difference: 0 of 255 in the pictures (exact)",
        "of the latents: 2e-06, which is 5e-07 of one device's largest value",
    ]


def test_a_split_that_loses_says_so(compare):
    note = "note: splitting this job costs more than it gains; one device is the faster"
    assert note in compare(SPLIT, ONE).lines()


def test_where_a_cache_answered_steps_the_mean_counts_on_both_sides(compare):
    cached = compare(split=(0.6, 0.4, 0.01, 0.01), exact=False, reused_calls=2, levels=7)
    assert cached.step_seconds == (0.433, 0.14) and cached.compared == "3.1 × as fast as one device"
    assert "mean" in cached.lines()[0] and "(approximate)" in cached.lines()[3]


def test_a_single_step_is_all_there_is(compare):
    single = compare((0.5,), latent_peak=0.0)
    assert single.lines()[0] == "one device: 1 step in 0.5 s, median 0.5 s"
    assert single.lines()[-1].endswith("which is 0 of one device's largest value")
