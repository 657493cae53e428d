"""A rank without tokens: every split that the checks let through runs, and gives what one rank gives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from differences import relative_difference
from flux_requests import CONTEXT, POOLED, request
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_model
from parallel_backend.engine.blocks import compile as compiling
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.models.registry import inspect_model
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from patchwise_oracle import patchwise_sample
from plain_jobs import PlainJobs, run_plain
from ranks import run_ranks
from tiny_flux import write_tiny_flux

HEADS, TOLERANCE = 2, 1e-5
SIZES = dict(heads=HEADS, double_blocks=1, single_blocks=2, context_dim=CONTEXT, pooled_dim=POOLED)
EXACT = 99  # warm-up steps, more than any request has
FEW_STEPS = request((2, 2), 1.0, 1, positive_tokens=1, steps=8)
SINGLE_TOKENS = request((2, 2), 1.0, 1, positive_tokens=1, steps=2)  # one of text, one of the image


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_flux(tmp_path_factory.mktemp("few_tokens") / "tiny.safetensors", **SIZES))


def subject_alone(world, path, cache=None):
    """The calls of one rank, in a process that is one of several."""
    alone = World(rank=0, world_size=1, device=world.device, backend="gloo", store_path="")
    return PlainJobs(Layouts(alone)).forward(path, Placement(), cache)


def differences(world, path, strategies, case):
    """From one rank's latent, under each strategy."""
    jobs, expected = PlainJobs(Layouts(world)), run_plain(subject_alone(world, path), case)
    return [relative_difference(jobs.run(path, strategy, case)[0], expected) for strategy in strategies]


def assert_equal_to_one_rank(path, world_size, strategies, case):
    for strategy in strategies:
        assert strategy.world_size == world_size
    for rank, found in enumerate(
        run_ranks(differences, world_size, path, strategies, case, backend=NCCL_STREAMS)
    ):
        for strategy, off in zip(strategies, found, strict=True):
            assert off <= TOLERANCE, f"rank {rank}, {strategy.describe()}: {off:.2e}"


def test_ring_3_with_one_text_token_and_a_latent_of_2_by_2(path):
    assert_equal_to_one_rank(path, 3, [ParallelStrategy(ring_degree=3)], SINGLE_TOKENS)


def test_four_ranks_with_two_tokens_under_every_kind_of_split(path):
    strategies = [
        ParallelStrategy(ring_degree=4),
        ParallelStrategy(ring_degree=2, ulysses_degree=2),
        ParallelStrategy(ring_degree=2, tensor_degree=2),
        ParallelStrategy(ring_degree=4, shard_weights=True),
        ParallelStrategy(pipefusion_degree=2, cfg_degree=2, num_pipeline_patch=4, warmup_steps=1),
    ]
    assert_equal_to_one_rank(path, 4, strategies, SINGLE_TOKENS)  # the last one too: one token is one patch


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(ulysses_degree=2, device_shares=(1, 1000)),
        ParallelStrategy(ring_degree=2, device_shares=(1000, 1)),
    ],
    ids=ParallelStrategy.describe,
)
def test_extreme_device_shares(path, strategy):
    case = request((6, 6), 4.0, 1, positive_tokens=3, negative_tokens=1, steps=2)
    assert_equal_to_one_rank(path, strategy.world_size, [strategy], case)


def flowing_patches(world, path, strategy, case):
    return PlainJobs(Layouts(world)).run(path, strategy, case)[0]


def test_pipefusion_2_with_33_patches_on_16_by_16(path, tmp_path):
    """64 tokens in 33 patches, most of two tokens."""
    case = request((16, 16), 1.0, 1, steps=3)
    strategy = ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=33, warmup_steps=1)
    expected = patchwise_sample(oracle_model(tmp_path, **SIZES), case, 1, (2,) * 31 + (1, 1))
    for latent in run_ranks(flowing_patches, 2, path, strategy, case, backend=NCCL_STREAMS):
        assert relative_difference(latent, expected) <= TOLERANCE


def compiled_and_cached(world, path):
    """Differences of compiled blocks and of a step cache, blocks that ran uncompiled, and calls that were reused."""
    jobs, strategy, case = PlainJobs(Layouts(world)), ParallelStrategy(ring_degree=3), FEW_STEPS
    alone = subject_alone(world, path)
    compiled = jobs.forward(path, Placement(strategy, "native", ComputeOptions("blocks")))
    expected = run_plain(alone, case)
    off = relative_difference(run_plain(compiled, case), expected)
    uncompiled = compiling.compiler().take().uncompiled
    caches = ModuleCache(0.6), ModuleCache(0.6)
    expected = run_plain(subject_alone(world, path, caches[0]), case)
    latent, _, _ = jobs.run(path, strategy, case, cache=caches[1])
    return [off, relative_difference(latent, expected), uncompiled, *(cache.reused for cache in caches)]


def test_compiled_blocks_and_the_step_cache_where_a_rank_has_no_tokens(path, monkeypatch):
    monkeypatch.setenv(COMPILE_BACKEND, "eager")
    for compiled, cached, uncompiled, *reused in run_ranks(compiled_and_cached, 3, path):
        assert max(compiled, cached) <= TOLERANCE and uncompiled == 0
        assert reused[0] == reused[1] > 0


DEGREES = ("data_degree", "cfg_degree", "ring_degree", "ulysses_degree", "tensor_degree", "pipefusion_degree")


@st.composite
def splits(draw):
    """A strategy on 2 to 4 ranks that the checks let through, with or without shares."""
    degrees = dict.fromkeys(draw(st.lists(st.sampled_from(DEGREES), min_size=1, max_size=2, unique=True)), 2)
    if degrees == {"ring_degree": 2}:
        degrees["ring_degree"] = draw(st.integers(2, 4))
    strategy = ParallelStrategy(**degrees)
    if strategy.pipefusion_degree == 1:
        strategy = strategy.replace(shard_weights=draw(st.booleans()))
    else:
        patches = draw(st.integers(0, 9))
        strategy = strategy.replace(num_pipeline_patch=patches, warmup_steps=EXACT)
    if draw(st.booleans()):
        shares = draw(st.lists(st.sampled_from((1, 2, 30, 1000)), min_size=4, max_size=4))
        strategy = strategy.replace(device_shares=tuple(shares[: strategy.world_size]))
    return strategy


@st.composite
def cases(draw):
    height, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    texts = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return request(
        (height, width), draw(st.sampled_from((1.0, 4.0))), draw(st.integers(1, 2)), *texts, steps=1
    )


@settings(
    max_examples=16, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck], database=None
)
@given(strategy=splits(), case=cases())
def test_whatever_the_checks_let_through_gives_what_one_rank_gives(path, strategy, case):
    if strategy.violations(inspect_model(path).shape, strategy.world_size):
        return
    assert_equal_to_one_rank(path, strategy.world_size, [strategy], case)
