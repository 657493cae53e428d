"""Samplers that decide by tensor values give stock's latent on ranks that count as unlike cards."""

from differences import relative_difference
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.rank.work import job as jobs
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from shipped_jobs import stock_latent

AXES = ("ulysses_degree", "cfg_degree")


def test_a_sampler_that_decides_by_values_gives_stocks_latent(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "are_unlike", lambda world: True)
    spec = tiny_model(tmp_path)
    samplers = {name: loop_job(name) for name in ("dpm_adaptive", "euler")}

    def latents(world) -> dict:
        ranks, strategies = LoopRanks(world, spec), [ParallelStrategy(**{axis: 2}) for axis in AXES]
        return {name: [ranks.run(one, job)[0] for one in strategies] for name, job in samplers.items()}

    expected = {name: stock_latent(spec, job) for name, job in samplers.items()}
    for found in run_ranks(latents, 2):
        for name, latents_of_one in found.items():
            for latent in latents_of_one:
                assert not latent.numel() or relative_difference(latent, expected[name]) <= 1e-5, name
