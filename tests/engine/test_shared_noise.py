"""Ancestral noise is one rank's on all: cards that differ draw different numbers from one seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flux_requests import CONTEXT, POOLED, SIZES, request
from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.diffusers import load as _load_flux  # noqa: F401  # once, before ranks are forked
from parallel_backend.sampling import denoise as loop
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks
from tiny_flux import write_tiny_flux

CASE = replace(request(SIZES["odd sides"], 4.0, 1), sampler="euler_ancestral")
STRATEGIES = {
    2: [
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(cfg_degree=2),
        ParallelStrategy(tensor_degree=2),
        ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=3),
    ],
    4: [ParallelStrategy(pipefusion_degree=2, cfg_degree=2, num_pipeline_patch=3)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    sizes = dict(heads=2, double_blocks=1, single_blocks=1, context_dim=CONTEXT, pooled_dim=POOLED)
    return str(write_tiny_flux(folder / "tiny.safetensors", **sizes))


def with_like_and_unlike_cards(world, path, strategies):
    start, found, jobs = loop.start_history, [], PlainJobs(Layouts(world))
    for strategy in strategies:
        loop.start_history = start
        alike, _, _ = jobs.run(path, strategy, CASE)
        loop.start_history = lambda seed, device: start(seed + world.rank, device)
        found.append([alike, jobs.run(path, strategy, CASE)[0]])
    return found


@pytest.mark.parametrize("world_size", STRATEGIES)
def test_ranks_that_draw_different_noise_sample_the_first_ones_latent(path, world_size):
    by_rank = run_ranks(
        with_like_and_unlike_cards, world_size, path, STRATEGIES[world_size], backend=NCCL_STREAMS
    )
    for number, strategy in enumerate(STRATEGIES[world_size]):
        expected = by_rank[0][number][0]
        for rank, found in enumerate(by_rank):
            assert torch.equal(found[number][1], expected), f"{strategy.describe()}, rank {rank}"
