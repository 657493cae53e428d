"""The step cache: decided by all ranks together, so that every strategy gives what one rank gives with it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import FirstBlockCacheConfig

from differences import relative_difference
from flux_requests import CONTEXT, POOLED, request
from oracle import oracle_model, oracle_sample
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.first_block_cache import CachedForward
from parallel_backend.engine.load import load_under
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tiny_flux import write_tiny_flux

SIZES = dict(heads=2, double_blocks=2, single_blocks=1, context_dim=CONTEXT, pooled_dim=POOLED)
TOLERANCE = 1e-5
STEPS = 8
# One row of tokens that do not divide, with which some ranks have none; six rows whose prompts have two lengths, which
# one rank computes one after the other and two ranks side by side.
CASES = {
    "one image": request((10, 14), 1.0, 1, steps=STEPS),
    "three images, two lengths": request((8, 8), 4.0, 3, 8, 5, steps=STEPS),
}
THRESHOLDS = {"one image": 0.62, "three images, two lengths": 0.59}
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
PAIR = STRATEGIES[2][0]


class Noted(CachedForward):
    """Notes the ratio of each decision, and what it would have been by this rank's own tokens."""

    def __init__(self, *args):
        super().__init__(*args)
        self.ratios, self.own = [], []

    def _largest(self, sums):
        change, before = sums[sums[:, 1] > 0].unbind(1)
        self.own.append((change / before).max().item() if len(change) else None)
        self.ratios.append(super()._largest(sums))
        return self.ratios[-1]


def sample(world, path, strategies):
    """{strategy: case: (latent, calls, reused, ratios)} on one rank."""
    layouts, results = Layouts(world), {}
    for strategy in strategies:
        forward = make_forward(load_under(ModelSpec(path), layouts, strategy), layouts, Placement(strategy))
        for name, case in CASES.items():
            cached = Noted(forward, THRESHOLDS[name])
            latent = denoise(cached, case, lambda i, denoised: None)
            results[f"{strategy.describe()}: {name}"] = latent, cached.calls, cached.reused, cached.ratios
    return results


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
            cache[world_size] = run_ranks(sample, world_size, subject[0], STRATEGIES[world_size])
        return cache[world_size]

    return get


@pytest.mark.xdist_group("engine_step_cache")
@pytest.mark.parametrize("strategy", STRATEGIES[2] + STRATEGIES[4], ids=lambda s: s.describe())
def test_every_strategy_gives_what_one_rank_gives_with_the_cache(results_of, strategy):
    (alone,) = results_of(1)
    for name in CASES:
        expected, calls, reused, ratios = alone[f"one device: {name}"]
        assert calls == STEPS and 0 < reused < calls - 1
        # Far from the threshold, so that rounding cannot decide otherwise.
        assert min(abs(ratio - THRESHOLDS[name]) for ratio in ratios) > 0.01
        for rank in results_of(strategy.world_size):
            latent, *counts, seen = rank[f"{strategy.describe()}: {name}"]
            assert counts == [calls, reused]
            assert relative_difference(latent, expected) <= TOLERANCE
            assert seen == pytest.approx(ratios, rel=1e-5)


@pytest.mark.xdist_group("engine_step_cache")
def test_one_rank_gives_what_diffusers_first_block_cache_gives(results_of, subject):
    """Where one image has no negative prompt both compare the same numbers; of more rows diffusers takes the mean."""
    _, model = subject
    exact = oracle_sample(model, CASES["one image"])
    model.enable_cache(FirstBlockCacheConfig(threshold=THRESHOLDS["one image"]))
    try:
        with model.cache_context("cond"):
            expected = oracle_sample(model, CASES["one image"])
    finally:
        model.disable_cache()
    latent = results_of(1)[0]["one device: one image"][0]
    assert relative_difference(latent, expected) <= TOLERANCE
    assert relative_difference(exact, expected) > 1000 * TOLERANCE


def runs_of_two_ranks(world, path):
    """Latents on one rank: without a cache, with threshold 0, twice with one, with one that lies between what the two
    ranks find by their own tokens, and without again; what was decided; the states that were kept."""
    layouts, case, states = Layouts(world), CASES["one image"], []
    forward = make_forward(load_under(ModelSpec(path), layouts, PAIR), layouts, Placement(PAIR))

    def latent(forward, **keep):
        return denoise(forward, case, lambda i, denoised: None, **keep)

    never = Noted(forward, 0.0)
    found = {"plain": latent(forward), "never": latent(never)}
    own = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(own, torch.tensor([never.own[0]], dtype=torch.float64))
    between = torch.cat(own).mean().item()
    usual = THRESHOLDS["one image"]
    for name, threshold in (("first", usual), ("again", usual), ("between", between)):
        cached = Noted(forward, threshold)
        keep = cached.kept_by(lambda make: states.append(make()))
        found[name] = latent(cached, keep=keep)
    found["after"] = latent(forward)
    return {
        **found,
        "own decision": never.own[0] < between,
        "decisions": [ratio < between for ratio in cached.ratios],
        "states": [(state.step, state.calls, state.reused, state.exact) for state in states[: STEPS - 1]],
    }


def test_ranks_that_would_decide_apart_decide_together(subject):
    one, other = run_ranks(runs_of_two_ranks, 2, subject[0])
    assert one["own decision"] != other["own decision"]  # they would have gone different ways, and hung
    assert one["decisions"] == other["decisions"] and any(one["decisions"])
    for name in ("plain", "never", "first", "again", "between", "after"):
        assert torch.equal(one[name], other[name]), name
    # Never to reuse is exact to the bit, a run repeated is the same, and nothing outlives its job.
    assert torch.equal(one["never"], one["plain"]) and torch.equal(one["after"], one["plain"])
    assert torch.equal(one["first"], one["again"]) and not torch.equal(one["first"], one["plain"])
    # What a resumed job must know: how often it reused, and that it is no longer exact.
    assert [state[:2] for state in one["states"]] == [(step, step) for step in range(1, STEPS)]
    reused = [state[2] for state in one["states"]]
    assert reused[0] == 0 and reused == sorted(reused) and reused[-1] > 0
    assert [state[3] for state in one["states"]] == [count == 0 for count in reused]
