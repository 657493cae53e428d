"""Six and eight ranks under products of three axes, and batches over replicas: the latent of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flux_requests import CONTEXT, POOLED, SIZES, TOLERANCE, request
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_sample, oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.load import load_under
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

HEADS, BLOCKS = 2, 2
CASES = {
    "odd sides, cfg 4": request(SIZES["odd sides"], 4.0, 1, positive_tokens=8, negative_tokens=5, steps=2),
    "five images": request(SIZES["dividing"], 1.0, 5, steps=2),
}
EXACT = {"warmup_steps": 2}
STRATEGIES = {
    2: [ParallelStrategy(data_degree=2)],
    6: [
        ParallelStrategy(pipefusion_degree=3, ulysses_degree=2, **EXACT),
        ParallelStrategy(cfg_degree=2, ring_degree=3),
        ParallelStrategy(ring_degree=3, tensor_degree=2),
        ParallelStrategy(data_degree=3, ulysses_degree=2, shard_weights=True),
    ],
    8: [
        ParallelStrategy(cfg_degree=2, pipefusion_degree=2, ulysses_degree=2, **EXACT),
        ParallelStrategy(data_degree=2, cfg_degree=2, pipefusion_degree=2, **EXACT),
        ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2),
        ParallelStrategy(data_degree=2, ring_degree=2, tensor_degree=2),
    ],
}


def sample(world, path, strategies, cases):
    layouts, results = Layouts(world), {}
    for strategy in strategies:
        model = load_under(ModelSpec(path), layouts, strategy)
        forward = make_forward(model, layouts, Placement(strategy))
        for name in cases:
            results[f"{strategy.describe()}: {name}"] = denoise(
                forward, CASES[name], lambda i, denoised: None
            )
    return results


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrids")
    sizes = dict(
        heads=HEADS, double_blocks=BLOCKS, single_blocks=BLOCKS, context_dim=CONTEXT, pooled_dim=POOLED
    )
    return oracle_subject(folder, CASES, **sizes)


@pytest.mark.parametrize("world_size", STRATEGIES)
def test_products_of_axes_equal_one_process(subject, world_size):
    path, expected, _ = subject
    for results in run_ranks(
        sample, world_size, path, STRATEGIES[world_size], list(CASES), backend=NCCL_STREAMS
    ):
        for strategy in STRATEGIES[world_size]:
            for name, latent in expected.items():
                difference = (results[f"{strategy.describe()}: {name}"] - latent).abs().max()
                assert difference <= TOLERANCE * latent.abs().max(), f"{strategy.describe()}: {name}"


def test_images_of_different_seeds_come_out_of_a_batch_as_they_do_alone(subject):
    """Five seeds on two replicas: three images on one, two on the other."""
    path, _, model = subject
    name = "five images"
    case = CASES[name]
    noises = [torch.randn(1, 16, 8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    alone = [
        oracle_sample(model, replace(case, noise=noise, latent=torch.zeros_like(noise))) for noise in noises
    ]
    batch = replace(case, noise=torch.cat(noises), latent=torch.zeros(5, 16, 8, 16))
    CASES["seeds"] = batch
    try:
        (first, _) = run_ranks(sample, 2, path, STRATEGIES[2], ["seeds"])
    finally:
        del CASES["seeds"]
    latent = first["data 2: seeds"]
    for i, expected in enumerate(alone):
        assert (latent[i : i + 1] - expected).abs().max() <= TOLERANCE * expected.abs().max(), f"seed {i}"
