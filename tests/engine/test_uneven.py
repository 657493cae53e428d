"""Devices that take unequal shares of the tokens give the latent of one process, under every sequence strategy."""

from __future__ import annotations

import pytest

from flux_requests import BLOCKS, CONTEXT, POOLED, TOLERANCE
from flux_requests import CASES as ALL_CASES
from oracle import oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.factory import make_forward
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

HEADS = 2
CASES = {
    name: ALL_CASES[name]
    for name in (
        "odd sides, cfg 4, batch 3",
        "text lengths differ",
        "fewer text tokens than ranks",
        "fewer image tokens than ranks",
    )
}
STRATEGIES = {
    2: [
        ParallelStrategy(ulysses_degree=2, device_shares=(24, 16)),
        ParallelStrategy(ring_degree=2, device_shares=(1, 9)),
    ],
    4: [
        ParallelStrategy(ring_degree=2, ulysses_degree=2, device_shares=(4, 1, 2, 1)),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2, device_shares=(3, 1, 1, 2)),
    ],
}


def sample(world, path, strategies, engine):
    layouts, model, results = Layouts(world), load(ModelSpec(path), world.device), {}
    for strategy in strategies:
        forward = make_forward(model, layouts, Placement(strategy, engine))
        for name, case in CASES.items():
            results[f"{strategy.describe()}: {name}"] = denoise(forward, case, lambda i, denoised: None)
        results[strategy.describe()] = "\n".join([forward.engine, *forward.notes])
    return results


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven")
    sizes = dict(
        heads=HEADS, double_blocks=BLOCKS, single_blocks=BLOCKS, context_dim=CONTEXT, pooled_dim=POOLED
    )
    return oracle_subject(folder, CASES, **sizes)[:2]


@pytest.mark.parametrize("world_size", STRATEGIES)
def test_unequal_shares_of_the_tokens_are_exact(subject, world_size):
    path, expected = subject
    for results in run_ranks(sample, world_size, path, STRATEGIES[world_size], "native"):
        for strategy in STRATEGIES[world_size]:
            for name, latent in expected.items():
                difference = (results[f"{strategy.describe()}: {name}"] - latent).abs().max()
                assert difference <= TOLERANCE * latent.abs().max(), f"{strategy.describe()}: {name}"


def test_xfuser_leaves_unequal_shares_to_native_and_says_so(subject):
    path, expected = subject
    strategy = STRATEGIES[2][1]
    for results in run_ranks(sample, 2, path, [strategy], "xfuser", backend="gloo"):
        engine, note = results[strategy.describe()].split("\n")
        assert engine == "native" and "equal shares" in note
        for name, latent in expected.items():
            difference = (results[f"{strategy.describe()}: {name}"] - latent).abs().max()
            assert difference <= TOLERANCE * latent.abs().max(), name


def test_the_larger_share_holds_more_tokens():
    from parallel_backend.engine.token_split import TokenPlan

    assert TokenPlan.split(16, 64, 2, (24, 16)).lengths == (48, 32)
