"""The arithmetic of a job's trials: the strategy of each step, for given step times."""

from __future__ import annotations

import itertools
import random

import pytest

from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import (
    BEHIND,
    BUDGET,
    FAR_BEHIND,
    GAIN,
    LONGEST,
    NO_TRIALS,
    SWITCH_COMPILED,
    SWITCH_CPU,
    SWITCH_GPU,
    Trial,
    TrialCandidate,
    TrialPlan,
    TrialRun,
    switch_seconds,
)

ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
CFG, ONE = ParallelStrategy(cfg_degree=2), ParallelStrategy()
PLENTY = 99.0


def plan(*others, budget=PLENTY, **facts):
    return TrialPlan(tuple(TrialCandidate(strategy, **facts) for strategy in others), budget)


def ran(times, steps=28, trials=None, first_step_s=0.0):
    """Runs a job and returns (the strategy of each step, the TrialRun, seconds). A step takes `times` of its strategy,
    and the first one after a change takes `first_step_s` more."""
    run, said, took = TrialRun(ULYSSES, trials or plan(RING, CFG, ONE), steps), [], 0.0
    for _ in range(steps):
        strategy = run.strategy
        seconds = times[strategy] + (first_step_s if said and strategy != said[-1] else 0.0)
        run.took(seconds)
        took += seconds
        said.append(strategy)
    return said, run, took


def test_each_strategy_gets_a_few_steps_and_the_fastest_the_rest():
    times = {ULYSSES: 1.0, RING: 1.05, CFG: 0.5, ONE: 0.52}
    said, run, _ = ran(times, 700, plan(RING, CFG, ONE, switch_s=6.0), first_step_s=5.0)
    assert said[:13] == [ULYSSES] * 4 + [RING] * 3 + [CFG] * 3 + [ONE] * 3 and len(said[:13]) == LONGEST
    assert set(said[13:]) == {CFG}
    assert run.is_settled and [t.strategy for t in run.results] == [ULYSSES, RING, CFG, ONE]
    # The first step of each warms up and does not count.
    assert run.results[0] == Trial(ULYSSES, (1.0, 1.0, 1.0))


@pytest.mark.parametrize(("seconds", "steps", "timed"), [(BEHIND, 2, True), (FAR_BEHIND, 1, False)])
def test_one_that_is_behind_ends_after_its_first_timed_step_and_one_far_behind_even_before(
    seconds, steps, timed
):
    said, run, _ = ran({ULYSSES: 1.0, RING: seconds + 0.01, CFG: 1.0, ONE: 1.0})
    assert said[4 : 5 + steps] == [RING] * steps + [CFG]
    assert run.results[1] == Trial(RING, (seconds + 0.01,) * timed)


def test_the_first_one_stays_unless_another_is_clearly_ahead():
    said, _, _ = ran({ULYSSES: 1.0, RING: 0.99, CFG: 1.0, ONE: 1.0})
    assert set(said[13:]) == {ULYSSES}


def test_a_short_job_tries_nothing_a_long_one_three_and_one_that_gets_short_stops():
    for steps in (4, 12):
        short, run, _ = ran({ULYSSES: 1.0}, steps)
        assert set(short) == {ULYSSES} and run.results == ()
    for budget in (BUDGET * 50, PLENTY):
        _, run, _ = ran(
            {ULYSSES: 1.0, RING: 1.1, CFG: 1.05, ONE: 1.1}, 50, plan(RING, CFG, ONE, budget=budget)
        )
        assert len(run.results) == 4
    said, _, _ = ran({ULYSSES: 1.0, RING: 1.0, CFG: 1.0, ONE: 0.1}, 18)
    assert CFG in said and ONE not in said


def test_a_change_that_costs_more_than_a_tenth_of_the_rest_is_not_made():
    times = {ULYSSES: 1.0, RING: 0.5}
    assert set(ran(times, trials=plan(RING, switch_s=2.5))[0]) == {ULYSSES}
    assert RING in ran(times, trials=plan(RING, switch_s=2.3))[0]
    assert switch_seconds(on_cpu=True, compiles=False) == SWITCH_CPU
    assert switch_seconds(on_cpu=False, compiles=False) == SWITCH_GPU
    assert {switch_seconds(on_cpu=cpu, compiles=True) for cpu in (True, False)} == {SWITCH_COMPILED}


def test_one_whose_lower_bound_is_no_better_is_not_tried():
    others = (TrialCandidate(RING), TrialCandidate(ONE, at_least_s=0.99))
    said, run, _ = ran({ULYSSES: 1.0, RING: 1.0, ONE: 9.0}, trials=TrialPlan(others, PLENTY))
    assert RING in said and ONE not in said
    assert [t.strategy for t in run.results] == [ULYSSES, RING]


def test_one_that_by_arithmetic_costs_more_than_the_budget_is_left_to_a_longer_job():
    """With one of two devices a step takes twice as long if computation is all that counts."""
    times = {ULYSSES: 1.0, RING: 1.0, ONE: 2.0}
    for steps, tries in ((28, False), (40, True)):
        others = (TrialCandidate(ONE, slower=2.0), TrialCandidate(RING))
        said, _, took = ran(times, steps, TrialPlan(others, BUDGET * steps))
        assert said.count(ONE) == tries and RING in said  # a strategy that costs less is still tried
        assert took <= (1 + BUDGET) * steps


def test_what_trials_have_lost_is_no_longer_there_for_others():
    times = {ULYSSES: 1.0, RING: 1.45, CFG: 1.0, ONE: 1.1}
    others = (TrialCandidate(RING), TrialCandidate(CFG), TrialCandidate(ONE, slower=1.1))
    assert ran(times, 28, TrialPlan(others, 2.0))[0].count(ONE) == 3
    said, _, _ = ran(times, 28, TrialPlan(others, 1.0))
    assert said.count(RING) == 2 and said.count(CFG) == 3 and ONE not in said


def test_a_trial_ends_where_it_has_used_the_budget_up_unless_it_leads():
    said, run, _ = ran({ULYSSES: 1.0, RING: 1.1, CFG: 0.8, ONE: 1.0}, 28, plan(RING, CFG, budget=0.05))
    assert said.count(RING) == 1 and run.results[1] == Trial(RING, ())  # no cost was expected of it
    assert CFG not in said  # no budget is left
    said, run, _ = ran({ULYSSES: 1.0, RING: 0.8}, 28, plan(RING, switch_s=1.0, budget=0.05), first_step_s=0.9)
    assert run.results[1].seconds[:2] == (0.8, 0.8) and said[-1] == RING  # only its first step was slow


LIKELY = {"close": (1.0, 1.08), "behind": (1.1, 1.4), "far": (1.4, 12.0), "ahead": (0.55, 0.95)}
# Kinds of step times of the three other strategies; a step under the first strategy takes 1 s.
CASES = [*itertools.combinations_with_replacement(LIKELY, 3)][:12]


@pytest.mark.parametrize("kinds", CASES, ids="-".join)
def test_trials_lose_the_budget_and_one_step_at_most_and_end_with_the_fastest_of_those_tried(kinds):
    """A loss is measured against the fastest strategy known at a step's start; 12 cases of 160 random jobs each."""
    clock = random.Random("-".join(kinds))
    for _, steps in itertools.product(range(40), (13, 20, 28, 50)):
        others = [clock.uniform(*LIKELY[kind]) for kind in clock.sample(kinds, 3)]
        times = dict(zip((ULYSSES, RING, CFG, ONE), (1.0, *others), strict=True))
        said, run, _ = ran(times, steps, plan(RING, CFG, ONE, budget=BUDGET * steps))
        known = list(itertools.accumulate((times[s] for s in said), min))
        lost = [times[s] - best for s, best in zip(said[:LONGEST], known, strict=False)]
        assert sum(lost) - max(lost) <= BUDGET * steps
        assert len(run.results) != 1 and times[said[-1]] <= GAIN * known[-1]


def test_without_a_budget_nothing_is_tried_that_could_lose_anything():
    dear = TrialPlan((TrialCandidate(ONE, slower=1.01),), 0.0)
    assert set(ran({ULYSSES: 1.0, ONE: 0.5}, trials=dear)[0]) == {ULYSSES}
    assert TrialRun(ULYSSES, NO_TRIALS, 28).is_settled


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
