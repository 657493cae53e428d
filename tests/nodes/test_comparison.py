"""The words and numbers of a comparison with one device."""

from __future__ import annotations

from dataclasses import replace

from pack_nodes import import_node_module

comparison = import_node_module("nodes.runs.comparison")
ONE = comparison.Side("one device", (0.9, 0.4, 0.4, 0.5), exact=True)
SPLIT = comparison.Side("Ulysses 2", (0.6, 0.2, 0.2, 0.1), exact=True)
COMPARED = comparison.DeviceComparison(ONE, SPLIT, levels=0, latent=2e-6, latent_peak=4.0)


def test_the_headline_tells_strategy_speed_up_both_times_and_the_difference():
    assert COMPARED.headline() == (
        "Ulysses 2 · 2.0 × as fast as one device · 0.2 s instead of 0.4 s per step · largest difference 0 of 255"
    )


def test_the_first_step_of_each_side_does_not_count_for_the_speed_up():
    assert COMPARED.step_seconds == (0.4, 0.2)
    slow_to_begin = replace(COMPARED, split=replace(SPLIT, step_seconds=(60.0, 0.2, 0.2, 0.1)))
    assert slow_to_begin.step_seconds == COMPARED.step_seconds


def test_the_page_gets_the_two_times_that_the_sentence_is_made_of():
    told = replace(COMPARED, one=SPLIT, split=replace(ONE, step_seconds=(9.0, 0.238))).as_dict()
    assert told["seconds"] == [0.2, 0.238] and told["compared"] == "16 % slower than one device"


def test_each_side_the_difference_and_whether_it_is_exact_have_a_line():
    assert COMPARED.lines() == [
        "one device: 4 steps in 2.2 s, median 0.4 s",
        "Ulysses 2: 4 steps in 1.1 s, median 0.2 s",
        "speed: 2.0 × as fast as one device (0.2 s instead of 0.4 s per step)",
        "largest difference: 0 of 255 in the pictures (exact)",
        "of the latents: 2e-06, which is 5e-07 of one device's largest value",
    ]


def test_a_split_that_loses_says_so():
    swapped = replace(COMPARED, one=SPLIT, split=ONE)
    assert "note: splitting this job costs more than it gains; one device is the faster" in swapped.lines()
    assert swapped.lines()[0].startswith("Ulysses 2: 4 steps in 1.1 s")
    assert not any("costs more" in line for line in COMPARED.lines())


def test_where_a_cache_answered_steps_the_mean_counts_on_both_sides():
    cached = replace(SPLIT, step_seconds=(0.6, 0.4, 0.01, 0.01), exact=False, skipped=True)
    compared = replace(COMPARED, split=cached, levels=7)
    assert compared.step_seconds == (0.433, 0.14) and compared.compared == "3.1 × as fast as one device"
    assert "mean" in compared.lines()[0] and "(approximate)" in compared.lines()[3]


def test_a_single_step_is_all_there_is():
    single = replace(COMPARED, one=replace(ONE, step_seconds=(0.5,)), latent_peak=0.0)
    assert single.lines()[0] == "one device: 1 step in 0.5 s, median 0.5 s"
    assert single.lines()[-1].endswith("which is 0 of one device's largest value")
