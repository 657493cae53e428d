"""Whole jobs of ComfyUI's own loop under NCCL's semantics: the communicators that they connect, also in mid-job."""

from __future__ import annotations

import pytest

from comfy_modules import import_comfyui_here
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from nccl_semantics import NCCL_SEMANTICS, count_connected
from parallel_backend.planner.workload.rank_memory import count_communicators
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.trials import TrialCandidate, TrialPlan
from ranks import run_ranks
from shipped_jobs import stock_latent
from wan_jobs import tiny_wan, wan_job

EXACT = 1e-5  # of the largest value
FLOW = {"warmup_steps": 1, "num_pipeline_patch": 2}


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    import_comfyui_here()
    folder = tmp_path_factory.mktemp("jobs")
    return {"flux": tiny_model(folder), "wan": tiny_wan(folder)}


def communicators(world, spec, job, strategy):
    """Returns the number of this rank's connected communicators after the first job of its process."""
    LoopRanks(world, spec).run(strategy, job)
    return count_connected()


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("flux", ParallelStrategy(ring_degree=2, ulysses_degree=2)),
        ("flux", ParallelStrategy(cfg_degree=2, ulysses_degree=2, shard_weights=True)),
        ("wan", ParallelStrategy(pipefusion_degree=3, **FLOW)),
        ("wan", ParallelStrategy(pipefusion_degree=2, cfg_degree=2, **FLOW)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_the_memory_prediction_counts_the_communicators_that_come_up(specs, family, strategy):
    job = wan_job() if family == "wan" else loop_job()
    found = run_ranks(
        communicators, strategy.world_size, specs[family], job, strategy, backend=NCCL_SEMANTICS
    )
    assert found == [count_communicators(strategy, rank) for rank in range(strategy.world_size)]


USP = ParallelStrategy(ring_degree=2, ulysses_degree=2)
TRIED = (
    ParallelStrategy(cfg_degree=2, ulysses_degree=2),
    ParallelStrategy(ring_degree=4),
    ParallelStrategy(),
)


def tried(world, spec, job):
    """Returns (latent, the strategies that steps ran under, number of connected communicators)."""
    trials = TrialPlan(tuple(map(TrialCandidate, TRIED)), budget=99.0)
    latent, run, _ = LoopRanks(world, spec).run(USP, job, trials=trials)
    return latent.cpu(), [trial.strategy.describe() for trial in run.trials], count_connected()


def test_groups_come_up_between_the_steps_of_a_job_that_tries_strategies(specs):
    job = loop_job("dpmpp_2m", steps=19)
    (latent, ran, count), *others = run_ranks(tried, 4, specs["flux"], job, backend=NCCL_SEMANTICS)
    expected = stock_latent(specs["flux"], job)
    assert (latent - expected).abs().max() <= EXACT * expected.abs().max()
    assert ran == [strategy.describe() for strategy in (USP, *TRIED)]
    # One of all ranks, and one for each of the two pairs that a rank is in: strategies share them.
    assert {count, *(other for *_, other in others)} == {3}
