"""Jobs whose samplers decide by values, on ranks that are taken for unlike cards: stock's latent, whatever is split."""

import pytest

from differences import relative_difference
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.rank.work import job as jobs
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from shipped_jobs import stock_latent


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)], ids=str
)
@pytest.mark.parametrize("sampler", ["dpm_adaptive", "euler"])
def test_a_sampler_that_decides_by_values_gives_stocks_latent(tmp_path, monkeypatch, strategy, sampler):
    monkeypatch.setattr(jobs, "are_unlike", lambda world: True)
    spec, job = tiny_model(tmp_path), loop_job(sampler)
    expected = stock_latent(spec, job)
    for latent in run_ranks(lambda world: LoopRanks(world, spec).run(strategy, job)[0], 2):
        if latent.numel():
            assert relative_difference(latent, expected) <= 1e-5
