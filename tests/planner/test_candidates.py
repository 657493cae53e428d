"""The ranking: candidates that fit and are exact first, then the rule's unless another was measured to be faster."""

import pytest

from jobs import flux_job, unet_job
from parallel_backend.errors import StrategyError
from parallel_backend.planner.candidates import (
    SHOWN,
    Candidate,
    enumerate_candidates,
    rank_candidates,
    table,
)
from parallel_backend.strategy import ParallelStrategy

FLUX = flux_job()
ONE, ULYSSES, RING = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
PIPE = ParallelStrategy(pipefusion_degree=2)


def test_every_enumerated_strategy_divides_as_it_must():
    assert all(c.cfg_degree == 1 for c in enumerate_candidates(FLUX, 4)), (
        "there is nothing to split by prompt"
    )
    found = enumerate_candidates(flux_job(prompts=2, batch=2), 8)
    assert len(set(found)) == len(found) and ONE in found
    for s in found:
        assert s.world_size <= 8 and s.cfg_degree <= 2 and s.data_degree <= 2
        assert 24 % s.tensor_degree == 0 and s.ulysses_degree * s.tensor_degree <= 24
    assert {c.world_size for c in found} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert any(c.ulysses_degree == 5 for c in found) and not any(c.tensor_degree == 5 for c in found)


def test_a_unet_is_split_by_rows_only():
    job = unet_job(prompts=2, batch=2)
    found = {c.describe() for c in enumerate_candidates(job, 4)}
    assert found == {"one device", "CFG 2", "data 2", "data 2 × CFG 2"}


def entries(*strategies, seconds=None, unfit=()):
    seconds = seconds or {}
    return [Candidate(s, 1e9 * (1 + s.shard_weights), s not in unfit, seconds.get(s)) for s in strategies]


def test_the_rule_stands_where_nothing_was_measured():
    ranking = rank_candidates(entries(ONE, RING, ULYSSES))
    assert [e.strategy for e in ranking.ranked] == [ULYSSES, RING, ONE] and ranking.reason == ""


def test_what_was_measured_faster_takes_the_rules_place_and_says_so():
    seconds = {ULYSSES: 0.5, RING: 0.4, ONE: 0.9}
    ranking = rank_candidates(entries(ONE, RING, ULYSSES, seconds=seconds))
    assert ranking.best.strategy == RING
    assert ranking.reason == (
        "Ring 2: measured before, a step takes Ring 2 0.4 s, Ulysses 2 0.5 s, one device 0.9 s"
    )
    assert [e.strategy for e in ranking.ranked] == [RING, ULYSSES, ONE]


def test_by_less_than_two_percent_or_against_what_was_not_seen_the_rule_stands():
    close = rank_candidates(entries(RING, ULYSSES, seconds={ULYSSES: 0.5, RING: 0.495}))
    assert close.best.strategy == ULYSSES and "the rule (CFG, then Ulysses) stands" in close.reason
    unseen = rank_candidates(entries(RING, ULYSSES, ONE, seconds={ONE: 0.1}))
    assert unseen.best.strategy == ULYSSES and unseen.reason == ""


def test_what_does_not_fit_is_never_chosen_and_comes_last():
    ranking = rank_candidates(entries(ONE, RING, ULYSSES, unfit=(ULYSSES,)))
    assert ranking.best.strategy == RING and ranking.ranked[-1].strategy == ULYSSES
    assert not ranking.ranked[-1].fits


def test_when_nothing_fits_the_smallest_comes_first_and_a_remedy_is_named():
    sharded = ULYSSES.replace(shard_weights=True)
    ranking = rank_candidates(entries(sharded, ULYSSES, unfit=(sharded, ULYSSES)), approximation="never")
    assert ranking.best.strategy == ULYSSES and not ranking.best.fits
    assert "nothing is predicted to fit" in ranking.reason and "fp8" in ranking.reason


def test_pipefusion_only_when_nothing_exact_fits():
    assert rank_candidates(entries(ULYSSES, PIPE)).best.strategy == ULYSSES
    chosen = rank_candidates(entries(ULYSSES, PIPE, unfit=(ULYSSES,)))
    assert chosen.best.strategy == PIPE and "nothing exact fits" in chosen.reason
    never = rank_candidates(entries(ULYSSES, PIPE, unfit=(ULYSSES,)), approximation="never")
    assert never.best.strategy == ULYSSES and not never.best.fits
    with pytest.raises(StrategyError, match="approximation is set to never"):
        rank_candidates(entries(PIPE), approximation="never")


def test_pipefusion_for_speed_needs_permission_and_to_have_been_measured():
    seconds = {ULYSSES: 0.5, PIPE: 0.3}
    unasked = rank_candidates(entries(ULYSSES, PIPE, seconds=seconds))
    assert unasked.best.strategy == ULYSSES and not unasked.ranked[-1].permitted
    asked = rank_candidates(entries(ULYSSES, PIPE, seconds=seconds), approximation="allowed")
    assert asked.best.strategy == PIPE
    unseen = rank_candidates(entries(ULYSSES, PIPE, seconds={ULYSSES: 0.5}), approximation="allowed")
    assert unseen.best.strategy == ULYSSES


def test_misuse_is_refused():
    with pytest.raises(StrategyError, match="No candidate"):
        rank_candidates([])


def test_a_table_has_the_chosen_one_first_and_one_device_among_its_rows():
    ranked = rank_candidates(Candidate(s, 1.0) for s in enumerate_candidates(FLUX, 8)).ranked
    shown = table(ranked, ranked[3].strategy)
    assert len(shown) == SHOWN and shown[0] == ranked[3] and shown[-1].strategy == ONE
