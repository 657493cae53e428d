"""A job that changes its strategy between steps: the latent of one device, whatever was tried on the way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from differences import relative_difference
from fault_injection import fault
from flux_requests import TOLERANCE, request
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.errors import Cancelled, StrategyError
from parallel_backend.observability.timeline import timeline
from parallel_backend.options import THREADS_ALONE
from parallel_backend.rank.work.device import all_threads
from parallel_backend.rank.work.plain_forward import PlainForward
from parallel_backend.rank.work.switching import Switching
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.sidecar.group.events import Stepped, listen
from parallel_backend.sidecar.process.environment import rank_environment
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import TrialCandidate, TrialPlan, TrialRun
from plain_jobs import PlainJobs
from ranks import run_ranks
from tiny_flux import write_tiny_flux

ULYSSES, RING = ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
CFG, ONE = ParallelStrategy(cfg_degree=2), ParallelStrategy()
TRIALS = TrialPlan(tuple(map(TrialCandidate, (RING, CFG, ONE))), budget=99.0)
STEPS = 19
SECONDS = {ULYSSES: 1.0, RING: 1.1, CFG: 1.1, ONE: 1.2}  # back to the first one at the end: four changes
MASK = torch.zeros(2, 1, 9, 13)
MASK[..., :7] = 1.0
CASES = {
    "plain": request((9, 13), 1.0, 1, steps=STEPS),
    "everything": replace(
        request((9, 13), 4.0, 2, positive_tokens=8, negative_tokens=5, steps=STEPS),
        sampler="euler_ancestral",
        seed=7,
        denoise_mask=MASK,
    ),
}


class ScriptedTrials(TrialRun):
    """As if each step had taken what SECONDS says; only rank 0's clock may count."""

    def __init__(self, rank, *args):
        super().__init__(*args)
        self._rank = rank

    def took(self, seconds):
        super().took(SECONDS[self.strategy] if self._rank == 0 else 100.0 * seconds)


class Boundary:
    """Keeps the number of the strategy of each step."""

    def __init__(self):
        self.strategy, self.told = 0, []

    def __call__(self, i, denoised):
        self.told.append(self.strategy)


def switched_and_alone(world, path):
    jobs, found = PlainJobs(Layouts(world)), {}
    by_itself = PlainJobs(
        Layouts(World(rank=0, world_size=1, device=world.device, backend="gloo", store_path=""))
    )
    for name, asked in CASES.items():
        boundary, trials = Boundary(), ScriptedTrials(world.rank, ULYSSES, TRIALS, STEPS)
        switching = Switching(world, trials, lambda s: jobs.subject(path, Placement(s)).ran, boundary)
        latent = denoise(PlainForward(lambda: switching.current), asked, switching.on_step)  # noqa: B023, now
        alone, _, _ = by_itself.run(path, ONE, asked)
        found[name] = (latent, alone, torch.tensor(boundary.told))
    return found


def test_a_job_that_changed_four_times_gives_what_one_device_gives(tmp_path):
    path = str(write_tiny_flux(tmp_path / "tiny.safetensors"))
    results = run_ranks(switched_and_alone, 2, path)
    for name in CASES:
        for latent, alone, numbers in (rank[name] for rank in results):
            assert relative_difference(latent, alone) <= TOLERANCE, name
            assert numbers.tolist() == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 2 + [0] * 7, name
        assert torch.equal(results[0][name][0], results[1][name][0]), name


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return ModelSpec(str(write_tiny_flux(tmp_path_factory.mktemp("flux") / "tiny.safetensors")))


def sample(ranks, spec, **more):
    return ranks.sample(spec, CASES["everything"], Placement(ULYSSES), **more)


def test_each_step_tells_its_strategy(two_real_ranks, spec):
    heard, phases = [], []
    stop = listen(heard.append)
    try:
        tried = sample(two_real_ranks, spec, trials=TRIALS, on_phase=phases.append)
    finally:
        stop()
    assert relative_difference(tried.latent, sample(two_real_ranks, spec).latent) <= TOLERANCE
    steps = [event.strategy for event in heard if isinstance(event, Stepped)]
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


def test_a_crash_in_the_middle_of_a_trial_ends_the_trials_and_not_the_job(no_leaks, spec, tmp_path):
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    try:
        with fault("kill", "the agreement on a strategy", step=5, once=tmp_path / "crashed"):
            survived = sample(sidecar, spec, trials=TRIALS)
        alone = sidecar.sample(spec, CASES["everything"], Placement(ONE))
        assert (tmp_path / "crashed").exists()
    finally:
        sidecar.stop()
    assert relative_difference(survived.latent, alone.latent) <= TOLERANCE
    assert survived.info.strategy == ULYSSES and len(survived.info.step_seconds) == STEPS
    assert [(t.strategy, t.seconds) for t in survived.info.trials] == [(s, ()) for s in TRIALS.strategies]
    assert "no other strategies were tried after that" in survived.info.notes


def test_memory_that_ends_in_a_trial_ends_the_trials_and_not_the_job(no_leaks, spec, tmp_path):
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    try:
        with fault("oom", "the agreement on a strategy", step=5, once=tmp_path / "ended"):
            found = sample(sidecar, spec, trials=TRIALS)
        assert (tmp_path / "ended").exists()
    finally:
        sidecar.stop()
    assert found.info.strategy == ULYSSES and found.latent.isfinite().all()
    assert all(not trial.seconds for trial in found.info.trials)


def test_a_cancel_in_the_middle_of_a_trial_leaves_warm_ranks(two_real_ranks, spec):

    def cancel(step, steps, preview):
        if step == 6:
            two_real_ranks.cancel()

    with pytest.raises(Cancelled):
        sample(two_real_ranks, spec, trials=TRIALS, on_step=cancel)
    assert two_real_ranks.state is State.READY


def test_one_device_of_two_is_the_first_one(two_real_ranks, spec):
    asked = CASES["plain"]
    latents = [two_real_ranks.sample(spec, asked, Placement(s)).latent for s in (ONE, ULYSSES)]
    assert relative_difference(*latents) <= TOLERANCE


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
def test_what_cannot_change_between_steps_is_refused_before_ranks_start(others, changes):
    sidecar = Sidecar(("cpu:0", "cpu:1"))
    trials = TrialPlan(tuple(map(TrialCandidate, others)))
    with pytest.raises(StrategyError, match="Steps of one job cannot run under"):
        sidecar.sample(
            ModelSpec("none"), replace(CASES["plain"], **changes), Placement(ULYSSES), trials=trials
        )
    assert sidecar.state is State.DOWN
