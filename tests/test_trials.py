"""The trials of a job as arithmetic: which strategy each step runs under, for given times."""

from __future__ import annotations

from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import (
    BEHIND,
    FAR_BEHIND,
    LONGEST,
    SWITCH_COMPILED,
    SWITCH_CPU,
    SWITCH_GPU,
    Trial,
    TrialPlan,
    TrialRun,
    switch_seconds,
)

ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
CFG, ONE = ParallelStrategy(cfg_degree=2), ParallelStrategy()


def plan(*others, at_least_s=None, switch_s=0.0):
    return TrialPlan(others, at_least_s or (0.0,) * len(others), switch_s)


def ran(times, steps=28, trials=None, first_step_s=5.0):
    """(the strategy of each step, the trials) of a job in which a step takes `times` of its strategy, and the first one
    under each `first_step_s` more, unless that is a dict by strategy."""
    run, said, before = TrialRun(ULYSSES, trials or plan(RING, CFG, ONE), steps), [], None
    for _ in range(steps):
        strategy = run.strategy
        extra = first_step_s if strategy != before and not isinstance(first_step_s, dict) else 0.0
        run.took(times[strategy] + extra)
        said.append(strategy)
        before = strategy
    return said, run


def test_each_strategy_gets_a_few_steps_and_the_fastest_the_rest():
    said, run = ran(
        {ULYSSES: 1.0, RING: 1.05, CFG: 0.5, ONE: 0.52}, trials=plan(RING, CFG, ONE, switch_s=6.0), steps=700
    )
    assert said[:13] == [ULYSSES] * 4 + [RING] * 3 + [CFG] * 3 + [ONE] * 3 and len(said[:13]) == LONGEST
    assert set(said[13:]) == {CFG}
    assert run.is_settled and [t.strategy for t in run.results] == [ULYSSES, RING, CFG, ONE]
    assert run.results[0] == Trial(
        ULYSSES, (1.0, 1.0, 1.0)
    )  # the first step of each warms up and does not count


def test_one_that_is_behind_ends_after_its_first_timed_step():
    said, run = ran({ULYSSES: 1.0, RING: BEHIND + 0.01, CFG: 1.0, ONE: 1.0}, first_step_s=0.0)
    assert said[4:6] == [RING] * 2 and said[6] == CFG
    assert run.results[1] == Trial(RING, (BEHIND + 0.01,))


def test_one_that_is_far_behind_ends_even_before_and_leaves_no_time():
    said, run = ran({ULYSSES: 1.0, RING: FAR_BEHIND + 0.01, CFG: 1.0, ONE: 1.0}, first_step_s=0.0)
    assert said[4] == RING and said[5] == CFG
    assert run.results[1] == Trial(RING, ())


def test_the_first_one_stays_unless_another_is_clearly_ahead():
    said, _ = ran({ULYSSES: 1.0, RING: 0.99, CFG: 1.0, ONE: 1.0}, first_step_s=0.0)
    assert set(said[13:]) == {ULYSSES}


def test_a_short_job_tries_nothing_and_one_that_gets_short_stops():
    short, run = ran({ULYSSES: 1.0}, steps=12)
    assert set(short) == {ULYSSES} and run.results == ()
    said, _ = ran({ULYSSES: 1.0, RING: 1.0, CFG: 1.0, ONE: 0.1}, steps=18, first_step_s=0.0)
    assert CFG in said and ONE not in said


def test_a_change_that_costs_more_than_a_tenth_of_the_rest_is_not_made():
    times = {ULYSSES: 1.0, RING: 0.5}
    assert set(ran(times, trials=plan(RING, switch_s=2.5))[0]) == {ULYSSES}
    assert RING in ran(times, trials=plan(RING, switch_s=2.3))[0]
    assert (switch_seconds(on_cpu=True, compiles=False), switch_seconds(on_cpu=False, compiles=False)) == (
        SWITCH_CPU,
        SWITCH_GPU,
    )
    assert (
        switch_seconds(on_cpu=True, compiles=True)
        == switch_seconds(on_cpu=False, compiles=True)
        == SWITCH_COMPILED
    )


def test_one_whose_lower_bound_is_no_better_is_not_tried():
    said, run = ran({ULYSSES: 1.0, RING: 1.0, ONE: 9.0}, trials=plan(RING, ONE, at_least_s=(0.0, 0.99)))
    assert RING in said and ONE not in said
    assert [t.strategy for t in run.results] == [ULYSSES, RING]


def test_another_process_follows_and_may_settle_early():
    lead, other = (TrialRun(ULYSSES, plan(RING), 28) for _ in range(2))
    for _ in range(28):
        lead.took(1.0 if lead.strategy == ULYSSES else 0.5)
        other.took(9.0)
        other.follow(lead.current, lead.is_settled)
        assert other.strategy == lead.strategy
    assert lead.strategy == RING
    early = TrialRun(ULYSSES, plan(RING), 28)
    for _ in range(5):
        early.took(1.0)
    assert early.strategy == RING
    early.settle()
    assert early.strategy == ULYSSES and early.is_settled
