"""ComfyUI's own loop on the ranks through a sidecar: each sampler gives what stock gives, and stops, goes on and
changes strategies at any step."""

from __future__ import annotations

import pytest

from comfy_modules import import_comfyui_here
from loop_jobs import loop_job, stock_latent, tiny_model
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy

STOCK_TOLERANCE = 1e-5  # of the largest value: the tiny model is deeper in no place than these digits
ULYSSES, CFG = ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)
ONE = ParallelStrategy()
# One that keeps nothing between steps, one of several steps, an ancestral one, one with a tree of noise.
KINDS = ("euler", "dpmpp_2m", "euler_ancestral", "dpmpp_sde")


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("loop"))


def samplers() -> list[str]:
    import_comfyui_here()
    from comfy.samplers import KSampler

    return list(KSampler.SAMPLERS)


def difference(found, wanted) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def test_every_sampler_gives_the_stock_latent(two_real_ranks, spec, subtests):
    names, met = samplers(), {}
    assert len(names) >= 40
    for number, name in enumerate(names):
        strategy = (ULYSSES, CFG)[number % 2]
        job = loop_job(name, mask=number % 3 == 0, batch=1 + number % 5 // 4)
        result = two_real_ranks.sample(spec, job, Placement(strategy))
        with subtests.test(sampler=name):
            assert difference(result.latent, stock_latent(spec.path, job)) <= STOCK_TOLERANCE
            assert result.info.exact and result.info.strategy == strategy and min(result.info.bytes_sent) > 0
            met[name] = result.info.model_calls / len(result.info.step_seconds)
    assert len(met) == len(names)
