"""The timeline: it splits steps into computing, sending and waiting, and names the device that others wait for."""

import pytest

from parallel_backend.observability.timeline import SHOWN, Spent, in_words, rows_of_timeline, timeline
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy

ULYSSES = ParallelStrategy(ulysses_degree=2)


def run(*inside, steps=(1.0, 1.0)):
    return RunInfo("native", ULYSSES, steps, inside_seconds=inside)


def test_the_rank_that_spent_the_least_in_collectives_waited_for_nobody():
    slow, fast = timeline(run((0.1, 0.2), (0.4, 0.2)))
    assert slow == (Spent(0.9, 0.1, 0.0), Spent(0.8, 0.2, 0.0))
    assert fast == (Spent(0.6, 0.1, pytest.approx(0.3)), Spent(0.8, 0.2, 0.0))


def test_after_a_crash_the_last_steps_have_times():
    (first, _) = timeline(run((0.5,), (0.25,), steps=(9.0, 9.0, 1.0)))
    assert first == (Spent(0.5, 0.25, 0.25),)


def test_a_clock_that_runs_ahead_of_another_gives_no_negative_times():
    for ranks in timeline(run((1.5, 0.0), (1.2, 0.0))):
        for spent in ranks:
            assert min(spent.computing, spent.sending, spent.waiting) >= 0
            assert spent.computing + spent.sending + spent.waiting == pytest.approx(1.0)


@pytest.mark.parametrize("inside", [(), ((0.1, 0.1),), ((0.1, 0.1), ()), ((0.1, 0.1), (0.1,)), ((), ())])
def test_without_times_of_all_ranks_there_is_none(inside):
    assert timeline(run(*inside)) == ()
    assert in_words(timeline(run(*inside)), ("cuda:0", "cuda:1")) == []


def test_shares_are_told_and_for_whom_the_others_wait():
    devices = ("cuda:0", "cuda:1")
    assert in_words(timeline(run((0.1, 0.1), (0.1, 0.1))), devices) == [
        "timeline: devices computed 90% of the time, sent 10% and waited for each other 0%"
    ]
    _, line = in_words(timeline(run((0.1, 0.1), (0.4, 0.4))), devices)
    assert line == (
        "timeline: the others wait for cuda:0 during 30% of each step; with device_shares you can give it less"
    )


def test_a_picture_gets_the_last_steps_of_each_rank():
    ranks = timeline(run((0.1, 0.2), (0.4, 0.2)))
    assert rows_of_timeline(ranks, ("cuda:0", "cuda:1")) == {
        "ranks": [
            {"device": "cuda:0", "steps": [[0.9, 0.1, 0.0], [0.8, 0.2, 0.0]]},
            {"device": "cuda:1", "steps": [[0.6, 0.1, 0.3], [0.8, 0.2, 0.0]]},
        ]
    }
    many = (0.5,) * (SHOWN + 5)
    rows = rows_of_timeline(timeline(run(many, many, steps=(1.0,) * len(many))), ("cuda:0", "cuda:1"))
    assert [len(rank["steps"]) for rank in rows["ranks"]] == [SHOWN, SHOWN]
