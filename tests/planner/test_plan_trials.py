"""The strategies that a job tries: same weights, fit in memory, not measured yet, the most promising first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import fake_nvml
from jobs import FP8, flux_job
from parallel_backend.machine.cards import CARDS
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.options import ComputeOptions
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.candidates import Candidate, enumerate_candidates
from parallel_backend.planner.history import MeasurementHistory
from parallel_backend.planner.step_bounds import lower_bound
from parallel_backend.planner.trials import SENDS_MORE, plan_trials
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import BUDGET, NO_TRIALS, SWITCH_COMPILED, SWITCH_GPU, Trial
from parallel_backend.wire.cache_folder import VARIABLE

ONE, ULYSSES, RING = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
GROUPS_2, GROUPS_4 = ULYSSES.replace(head_groups=2), ULYSSES.replace(head_groups=4)
TOKENS = GROUPS_2.replace(sends_tokens=True)
CFG, DATA = ParallelStrategy(cfg_degree=2), ParallelStrategy(data_degree=2)


@pytest.fixture
def gpus(tmp_path):
    return MeasurementHistory(("cuda:0", "cuda:1"), read_topology(fake_nvml.two_4090(), sys_root=tmp_path))


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(measurement_history, "GIVEN_UP", set())
    monkeypatch.setattr(measurement_history, "JOBS", Counter())


def cpus(count=2):
    return MeasurementHistory(tuple(f"cpu:{i}" for i in range(count)), Topology((), source="none"))


def known(job, count, **changes):
    return [replace(Candidate(s, 1.0), **changes) for s in enumerate_candidates(job, count)]


def begun(rule, job, history, candidates=None):
    count = len(history.devices)
    return plan_trials(rule, candidates or known(job, count), job, history, "native")


def planned(rule, job, history, candidates=None):
    return begun(rule, job, history, candidates)[1]


def test_all_devices_and_one_compete_those_with_the_least_to_do_and_to_send_first():
    assert planned(ULYSSES, flux_job(), cpus()).strategies == (ULYSSES, RING)
    assert planned(CFG, flux_job(prompts=2), cpus()).strategies == (ONE, ULYSSES, RING)


def test_whole_images_on_each_device_compete_for_a_batch_and_rows_are_tried_once():
    """Data 2 and CFG 2 split four rows in the same way."""
    assert planned(ULYSSES, flux_job(batch=2), cpus()).strategies == (ONE, ULYSSES, RING)
    assert planned(CFG, flux_job(batch=2, prompts=2), cpus()).strategies == (ONE, ULYSSES, RING)


def test_at_most_three_are_tried_and_one_device_is_always_among_them():
    job = flux_job(batch=8)
    assert planned(ParallelStrategy(ulysses_degree=8), job, cpus(8)).strategies == (
        ONE,
        ParallelStrategy(data_degree=4, ulysses_degree=2),
        ParallelStrategy(data_degree=4, ring_degree=2),
    )


def test_a_job_begins_with_tokens_together_where_that_is_no_more_work(gpus):
    """On a CPU, whose cores the ranks share, one device is no more work; on GPUs, whole images that divide evenly."""
    assert begun(ULYSSES, flux_job(FP8), gpus)[0] == ULYSSES
    for history in (gpus, cpus()):
        assert begun(ULYSSES, flux_job(FP8, batch=2), history)[0] == DATA
        assert begun(CFG, flux_job(FP8, prompts=2), history)[0] == CFG
    assert begun(ULYSSES, flux_job(FP8, batch=3), gpus)[0] == ULYSSES
    assert begun(ULYSSES, flux_job(), cpus())[0] == ONE
    four = ParallelStrategy(cfg_degree=2, ulysses_degree=2)
    quad = MeasurementHistory(tuple(f"cuda:{i}" for i in range(4)), gpus.topology)
    whole = ParallelStrategy(data_degree=2, cfg_degree=2)
    assert begun(four, flux_job(FP8, batch=2, prompts=2), quad)[0] == whole


def test_a_job_begins_with_the_rule_s_choice_where_that_was_measured_or_the_other_is_out_of_the_question():
    job = flux_job()
    measured = [replace(c, step_s=1.0) if c.strategy == ULYSSES else c for c in known(job, 2)]
    first, trials = begun(ULYSSES, job, cpus(), measured)
    assert first == ULYSSES and trials.strategies == (ONE, RING)
    seen = [replace(c, step_s=1.0) if c.strategy == ONE else c for c in known(job, 2)]
    assert begun(ULYSSES, job, cpus(), seen)[0] == ULYSSES
    full = [replace(c, fits=c.strategy != ONE) for c in known(job, 2)]
    assert begun(ULYSSES, job, cpus(), full)[0] == ULYSSES


def test_other_weights_no_room_stages_and_what_was_seen_are_not_tried():
    job, sharded = flux_job(), ULYSSES.replace(shard_weights=True)
    assert begun(sharded, job, cpus())[0] == sharded
    assert planned(sharded, job, cpus()).strategies == (RING.replace(shard_weights=True),)
    assert planned(ULYSSES, job, cpus(), known(job, 2, fits=False)) == NO_TRIALS
    assert planned(ULYSSES, job, cpus(), known(job, 2, step_s=1.0)) == NO_TRIALS
    for first in (ONE, ParallelStrategy(pipefusion_degree=2), ULYSSES.replace(device_shares=(2, 1))):
        assert planned(first, job, cpus()) == NO_TRIALS
    # A step that a cache answered says nothing about a strategy.
    assert planned(ULYSSES, flux_job(step_cache=True), cpus()) == NO_TRIALS


def test_what_came_to_nothing_is_not_tried_again_by_this_process():
    job, history = flux_job(), cpus()
    history.record(job, RunInfo("native", ULYSSES, (9.0, 1.0), trials=(Trial(RING), Trial(ULYSSES, (1.0,)))))
    assert planned(ULYSSES, job, cpus()).strategies == (ULYSSES,)
    assert planned(ULYSSES, flux_job(width=512), cpus()).strategies == (ULYSSES, RING)


def test_a_trial_s_price_is_what_one_device_computes_and_whether_it_sends_more(gpus):

    def prices(first, job, history):
        return {other.strategy: other.slower for other in planned(first, job, history).candidates}

    assert prices(ULYSSES, flux_job(FP8), gpus) == {TOKENS: 1.0, GROUPS_2: 1.0, ONE: 2.0}
    assert prices(CFG, flux_job(FP8, prompts=2), gpus) == {ULYSSES: SENDS_MORE, RING: SENDS_MORE, ONE: 2.0}
    # Ranks on a CPU share its cores, and the job begins with one device, which sends nothing.
    assert prices(ULYSSES, flux_job(FP8), cpus()) == {RING: SENDS_MORE, ULYSSES: SENDS_MORE}


def test_trials_may_lose_a_share_of_the_job_and_of_those_like_it_since_the_last_that_tried():
    job, history = flux_job(steps=20), cpus()
    assert planned(ULYSSES, job, history).budget == pytest.approx(BUDGET * 20)
    for budget in (2, 3):
        history.record(job, RunInfo("native", ONE, (9.0, 1.0)))
        assert planned(ULYSSES, job, history).budget == pytest.approx(BUDGET * 20 * budget)
    assert planned(ULYSSES, flux_job(steps=20, width=512), history).budget == pytest.approx(BUDGET * 20)
    trials = (Trial(ONE, (1.0,)), Trial(RING, (1.1,)))
    history.record(job, RunInfo("native", ONE, (9.0, 1.0), trials=trials))
    assert planned(ULYSSES, job, history).budget == pytest.approx(BUDGET * 20)


def test_on_gpus_bounds_and_the_price_of_a_change_come_along(gpus):
    job = flux_job(FP8)
    found = planned(ULYSSES, job, gpus)
    assert found.strategies == (TOKENS, GROUPS_2, ONE)
    # Groups need no new communicators.
    assert [o.switch_s for o in found.candidates] == [0.0, 0.0, SWITCH_GPU]
    bounds = [lower_bound(job, s, CARDS["rtx4090"]) for s in (TOKENS, GROUPS_2, ONE)]
    assert [o.at_least_s for o in found.candidates] == bounds and bounds[0] > 0
    compiled = flux_job(FP8, compute_options=ComputeOptions("blocks"))
    assert [o.switch_s for o in planned(ULYSSES, compiled, gpus).candidates] == [0.0, 0.0, SWITCH_COMPILED]


def test_other_exchanges_are_tried_before_a_ring_on_gpus_and_none_that_a_rank_has_no_heads_for(gpus):
    job = flux_job(FP8)
    seen = [replace(c, step_s=1.0) if c.strategy in (ULYSSES, ONE) else c for c in known(job, 2)]
    by_groups = [replace(seen[0], strategy=s, step_s=1.0) for s in (TOKENS, GROUPS_2, GROUPS_4)]
    assert planned(ULYSSES, job, gpus, seen).strategies == (TOKENS, GROUPS_2, GROUPS_4)
    assert planned(ULYSSES, job, gpus, seen + by_groups).strategies == (RING,)
    assert planned(GROUPS_4, job, gpus, seen + by_groups).strategies == (RING,)
    full = [replace(c, fits=c.strategy != ULYSSES) for c in known(job, 2)]
    assert planned(ULYSSES, job, gpus, full).strategies == (RING, ONE)
    eight = ParallelStrategy(ulysses_degree=8)  # three heads on each device
    many = MeasurementHistory(tuple(f"cuda:{i}" for i in range(8)), gpus.topology)
    assert planned(eight, job, many, [Candidate(eight, 1.0)]).strategies == (eight.replace(head_groups=2),)


def test_a_card_without_a_data_sheet_has_no_bounds(tmp_path):
    nvml = fake_nvml.two_4090()
    for board in nvml.boards:
        board.name = "NVIDIA Mystery 1"
    history = MeasurementHistory(("cuda:0", "cuda:1"), read_topology(nvml, sys_root=tmp_path))
    found = planned(ULYSSES, flux_job(FP8), history)
    assert found.strategies == (TOKENS, GROUPS_2, ONE)
    assert {o.at_least_s for o in found.candidates} == {0.0}
