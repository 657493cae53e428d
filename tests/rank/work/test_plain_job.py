"""Every strategy gives the latent of one process: in fp32, the max abs difference is <= 1e-5 x max|latent|."""

from __future__ import annotations

import pytest

from differences import relative_difference
from flux_requests import BLOCKS, TOLERANCE
from flux_requests import CASES_OF_TWO_STEPS as CASES
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks

# tests/engine/test_adapted_flux.py has the calls of a job under more strategies, and the bytes that each call sends.
STRATEGIES = {
    1: [ParallelStrategy()],
    2: [ParallelStrategy(cfg_degree=2), ParallelStrategy(ring_degree=2, offload_weights=True)],
    8: [
        ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2),
        ParallelStrategy(data_degree=2, cfg_degree=2, pipefusion_degree=2, warmup_steps=2),
        ParallelStrategy(data_degree=2, ring_degree=2, tensor_degree=2),
    ],
}
FEW_CASES = ("odd sides, cfg 4, batch 3", "text lengths differ", "fewer image tokens than ranks")


def cases_of(strategy):
    """Returns the names of the cases: few for products of axes, since one axis alone has them all."""
    return FEW_CASES if strategy.world_size == 8 else CASES


def sample(world, path, jobs, engine):
    """Returns (latent, engine that ran, its notes) of each job (strategy, case), all on the same loaded weights."""
    ranks, found = PlainJobs(Layouts(world)), []
    for strategy, case in jobs:
        latent, forward, _ = ranks.run(path, strategy, CASES[case], engine)
        found.append((latent, forward.engine, " ".join(forward.notes)))
    return found


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Returns (path of the weights, {case: the oracle's latent})."""
    sizes = dict(heads=4, double_blocks=BLOCKS, single_blocks=BLOCKS)
    return oracle_subject(tmp_path_factory.mktemp("parity"), CASES, **sizes)[:2]


@pytest.mark.parametrize("ranks", STRATEGIES)
def test_the_latent_equals_one_process(subject, ranks):
    path, expected = subject
    jobs = [(strategy, case) for strategy in STRATEGIES[ranks] for case in cases_of(strategy)]
    for rank, results in enumerate(run_ranks(sample, ranks, path, jobs, "native", backend=NCCL_STREAMS)):
        for (strategy, case), (latent, *_) in zip(jobs, results, strict=True):
            far = relative_difference(latent, expected[case])
            assert far <= TOLERANCE, f"rank {rank}, {strategy.describe()}, {case}: {far:.2e}"


# {strategy: the reason for which xfuser leaves it to native}
BY_XFUSER = {
    ParallelStrategy(ulysses_degree=2): "",
    ParallelStrategy(ring_degree=2): "",
    ParallelStrategy(ring_degree=2, device_shares=(1, 9)): "fell back to native",
    ParallelStrategy(cfg_degree=2): "fell back to native: CFG 2 splits no tokens",
}
XFUSERS_CASES = ("text lengths differ", "fewer image tokens than ranks")


def test_xfuser_gives_it_too_or_leaves_the_job_to_native_and_says_so(subject):
    """Strategies take turns, because xfuser has one set of groups per process."""
    path, expected = subject
    jobs = [(strategy, case) for case in XFUSERS_CASES for strategy in BY_XFUSER]
    for results in run_ranks(sample, 2, path, jobs, "xfuser", timeout=90, backend="gloo"):
        for (strategy, case), (latent, engine, notes) in zip(jobs, results, strict=True):
            reason, job = BY_XFUSER[strategy], f"{strategy.describe()}, {case}"
            assert relative_difference(latent, expected[case]) <= TOLERANCE, job
            assert engine == ("native" if reason else "xfuser") and reason in notes, job
