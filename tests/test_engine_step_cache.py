"""The step cache: decided by all ranks together, so that every strategy gives what one rank gives with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oracle import oracle_model
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.groups import Layouts
from parallel_backend.engine.step_cache import CachedForward
from parallel_backend.engine.weights import load_under
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from spread_weights import difference
from test_engine_parity import CONTEXT, POOLED, request
from tiny_flux import write_tiny_flux

SIZES = dict(heads=4, double_blocks=2, single_blocks=2, context_dim=CONTEXT, pooled_dim=POOLED)
TOLERANCE = 1e-5
STEPS = 12
# Tokens that do not divide; rows that go to different ranks, one of which may have none; prompts of two lengths, which
# one rank computes one after the other and two ranks side by side.
CASES = {
    "one image": request((10, 14), 1.0, 1, steps=STEPS),
    "cfg": request((9, 13), 4.0, 1, steps=STEPS),
    "three images, two lengths": request((8, 16), 4.0, 3, 8, 5, steps=STEPS),
    "heun": replace(request((8, 16), 1.0, 1, steps=STEPS // 2), sampler="heun"),
}
STRATEGIES = {
    1: [ParallelStrategy()],
    2: [
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ring_degree=2),
        ParallelStrategy(cfg_degree=2),
        ParallelStrategy(data_degree=2),
        ParallelStrategy(tensor_degree=2),
        ParallelStrategy(cfg_degree=2, shard_weights=True),
    ],
    4: [
        ParallelStrategy(ring_degree=2, ulysses_degree=2),
        ParallelStrategy(data_degree=2, cfg_degree=2, shard_weights=True),
    ],
}


class Noted(CachedForward):
    """Notes the ratio of each decision, and what this rank would have decided by its own tokens."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ratios, self.own, self.decisions = [], [], []

    def _largest(self, sums):
        change, before = sums[sums[:, 1] > 0].unbind(1)
        self.own.append((change / before).max().item() if len(change) else None)
        self.ratios.append(super()._largest(sums))
        return self.ratios[-1]


def sample(world, path, strategies, thresholds):
    """{strategy: case: (latent, calls, reused, ratios, ratios of this rank's own tokens)} on one rank."""
    layouts, results = Layouts(world), {}
    for strategy in strategies:
        model = load_under(ModelSpec(path), layouts, strategy)
        forward = make_forward(model, layouts, Placement(strategy))
        for name, case in CASES.items():
            cached = Noted(forward, thresholds[name])
            latent = denoise(cached, case, lambda i, denoised: None)
            key = f"{strategy.describe()}: {name}"
            results[key] = (latent, cached.calls, cached.reused, cached.ratios, cached.own)
    return results


# Between the ratios that these cases have: the one nearest is 0.02 away, a thousand times what rounding moves it.
THRESHOLDS = {"one image": 0.4, "cfg": 0.6, "three images, two lengths": 0.6, "heun": 0.3}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """(path of the weights, diffusers' own model with the same)"""
    folder = tmp_path_factory.mktemp("step_cache")
    return str(write_tiny_flux(folder / "tiny.safetensors", **SIZES)), oracle_model(folder, **SIZES)


@pytest.fixture(scope="module")
def results_of(subject):
    """`sample`'s results on each rank, per number of ranks, computed once."""
    cache = {}

    def get(world_size):
        if world_size not in cache:
            cache[world_size] = run_ranks(sample, world_size, subject[0], STRATEGIES[world_size], THRESHOLDS)
        return cache[world_size]

    return get


@pytest.mark.xdist_group("engine_step_cache")
@pytest.mark.parametrize("strategy", STRATEGIES[2] + STRATEGIES[4], ids=lambda s: s.describe())
def test_every_strategy_gives_what_one_rank_gives_with_the_cache(results_of, strategy):
    (alone,) = results_of(1)
    for name in CASES:
        expected, calls, reused, ratios, _ = alone[f"one device: {name}"]
        assert 0 < reused < calls - 1
        for rank in results_of(strategy.world_size):
            latent, *counts, seen, _ = rank[f"{strategy.describe()}: {name}"]
            assert counts == [calls, reused]
            assert difference(latent, expected) <= TOLERANCE
            assert seen == pytest.approx(ratios, rel=1e-5)
