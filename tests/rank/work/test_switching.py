"""A job that changes its strategy between steps gives stock's latent, whichever strategies it tries."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from differences import relative_difference
from fault_injection import fault
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.errors import Cancelled, StrategyError
from parallel_backend.observability.timeline import timeline
from parallel_backend.options import THREADS_ALONE
from parallel_backend.rank.work import job as jobs
from parallel_backend.rank.work.device import all_threads
from parallel_backend.rank.work.switching import Switching
from parallel_backend.requests import Placement
from parallel_backend.sidecar.group.events import Stepped
from parallel_backend.sidecar.process.environment import rank_environment
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import NO_TRIALS, TrialCandidate, TrialPlan, TrialRun
from ranks import run_ranks
from shipped_jobs import ship, stock_latent

TOLERANCE = 1e-5
ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
CFG, ONE = ParallelStrategy(cfg_degree=2), ParallelStrategy()
TRIALS = TrialPlan(tuple(map(TrialCandidate, (RING, CFG, ONE))), budget=99.0)
STEPS = 19
SECONDS = {ULYSSES: 1.0, RING: 1.1, CFG: 1.1, ONE: 1.2}  # back to the first one at the end: four changes
CASES = {
    "plain": loop_job(steps=STEPS, cfg=1.0),
    "everything": loop_job("euler_ancestral", steps=STEPS, batch=2, mask=True),
    "of several steps": loop_job("dpmpp_2m", steps=STEPS),
}


class ScriptedTrials(TrialRun):
    """Trials whose steps take the time in SECONDS by rank 0's clock; the clocks of other ranks must not count."""

    rank = 0

    def took(self, seconds):
        super().took(SECONDS[self.strategy] if self.rank == 0 else 100.0 * seconds)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("switching"))


def switched(world, spec):
    """Returns for each case (latent, the number of each step's strategy, which only the first rank reports)."""
    ranks, ScriptedTrials.rank, jobs.TrialRun = LoopRanks(world, spec), world.rank, ScriptedTrials
    found = {}
    for name, job in CASES.items():
        latent, _, parent = ranks.run(ULYSSES, job, trials=TRIALS)
        found[name] = latent, parent.strategies
    return found


def test_time_that_is_left_out_does_not_count_for_the_strategy():
    class Trials(TrialRun):
        def took(self, seconds):
            taken.append(seconds)

    taken, boundary = [], Mock()
    world = SimpleNamespace(control=None, synchronize=lambda: None)
    switching = Switching(world, Trials(ONE, NO_TRIALS, STEPS), lambda strategy: strategy, boundary)
    for seconds in (1000.0, 0.0):
        switching.leave_out(seconds)
        switching.on_step(0, torch.zeros(1), 0)
    assert taken[0] < 0 <= taken[1]
    assert boundary.call_count == 2


def test_a_job_that_changed_four_times_gives_stocks_latent(spec):
    first, other = run_ranks(switched, 2, spec)
    for name, job in CASES.items():
        latent, strategies = first[name]
        assert relative_difference(latent, stock_latent(spec, job)) <= TOLERANCE, name
        assert strategies == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 2 + [0] * 7, name
        assert torch.equal(latent, other[name][0]), name


def sample(ranks, spec, job=CASES["everything"], trials=NO_TRIALS, **more):
    return ranks.sample(spec, ship(spec, job, trials=trials), Placement(ULYSSES), **more)


def test_each_step_tells_its_strategy(two_real_ranks, spec, events):
    phases = []
    tried = sample(two_real_ranks, spec, trials=TRIALS, on_phase=phases.append)
    assert relative_difference(tried.latent, stock_latent(spec, CASES["everything"])) <= TOLERANCE
    steps = [event.strategy for event in events if isinstance(event, Stepped)]
    assert len(steps) == len(tried.info.step_seconds) == STEPS
    assert steps[:5] == [ULYSSES] * 4 + [RING] and steps[-1] == tried.info.strategy
    begun = list(dict.fromkeys(steps))
    assert begun[:2] == [ULYSSES, RING] and [t.strategy for t in tried.info.trials] == begun
    assert len(tried.info.trials[0].seconds) >= 3 and tried.info.exact
    every = (ULYSSES, *TRIALS.strategies)
    assert list(dict.fromkeys(phase for phase in phases if phase.startswith("trying "))) == [
        f"trying {strategy.describe()} ({every.index(strategy) + 1} of 4)" for strategy in begun[1:]
    ]
    assert len(timeline(tried.info)) == 2 and all(len(steps) == STEPS for steps in timeline(tried.info))
    assert all(0 < sum(inside) < sum(tried.info.step_seconds) for inside in tried.info.inside_seconds)
    plain = sample(two_real_ranks, spec)
    assert plain.info.trials == () and plain.info.strategy == ULYSSES


@pytest.mark.parametrize("kind", ["kill", "oom"])
def test_what_ends_a_trial_ends_the_trials_and_not_the_job(own_real_ranks, spec, tmp_path, kind):
    with fault(kind, "the agreement on a strategy", step=5, once=tmp_path / "fired"):
        survived = sample(own_real_ranks, spec, trials=TRIALS)
    assert (tmp_path / "fired").exists()
    assert relative_difference(survived.latent, stock_latent(spec, CASES["everything"])) <= TOLERANCE
    assert survived.info.strategy == ULYSSES and len(survived.info.step_seconds) == STEPS
    assert [(t.strategy, t.seconds) for t in survived.info.trials] == [(s, ()) for s in TRIALS.strategies]
    assert "no other strategies were tried after that" in survived.info.notes


def test_a_cancel_in_the_middle_of_a_trial_leaves_warm_ranks(two_real_ranks, spec):
    steps = []
    with pytest.raises(Cancelled):
        sample(
            two_real_ranks,
            spec,
            trials=TRIALS,
            on_step=lambda step, of, preview: steps.append(step),
            should_cancel=lambda: 6 in steps,
        )
    assert two_real_ranks.state is State.READY


def test_alone_on_the_cpu_a_rank_has_the_threads_of_all(monkeypatch):
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    monkeypatch.setenv(THREADS_ALONE, str(before + 2))
    with all_threads(cpu):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before
    with all_threads(torch.device("cuda")):
        assert torch.get_num_threads() == before
    root = Path("/")
    assert rank_environment({"OMP_NUM_THREADS": "3"}, root, ("cpu:0", "cpu:1"))[THREADS_ALONE] == "3"
    assert rank_environment({"OMP_NUM_THREADS": "3,2"}, root, ("cpu:0",))[THREADS_ALONE] == "3"
    free = rank_environment({}, root, ("cpu:0", "cpu:1"))
    for unusable in ("", " ", "many", "0", "-1", "1.5"):
        assert rank_environment({"OMP_NUM_THREADS": unusable}, root, ("cpu:0", "cpu:1")) == free
    assert int(free[THREADS_ALONE]) == len(os.sched_getaffinity(0)) >= int(free["OMP_NUM_THREADS"])


@pytest.mark.parametrize(
    ("others", "changes"),
    [
        ((ParallelStrategy(tensor_degree=2),), {}),
        ((ULYSSES.replace(shard_weights=True),), {}),
        ((ParallelStrategy(pipefusion_degree=2),), {}),
        ((RING,), {"cache_threshold": 0.1}),
    ],
    ids=["slices", "shards", "stages", "step cache"],
)
def test_what_cannot_change_between_steps_is_refused_before_ranks_start(spec, others, changes):
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    trials = TrialPlan(tuple(map(TrialCandidate, others)))
    with pytest.raises(StrategyError, match="Steps of one job cannot run under"):
        sample(sidecar, spec, replace(CASES["plain"], **changes), trials)
    assert sidecar.state is State.DOWN
