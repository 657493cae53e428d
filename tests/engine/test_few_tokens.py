"""Ranks without tokens: every split that the checks allow runs, and gives what one rank gives.

These splits are drawn at random. test_adapted_flux.py has chosen ones, with calls of single tokens among others."""

from __future__ import annotations

import random

import pytest
import torch

from adapted_flux import SIZES, call
from differences import relative_difference
from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.blocks import compile as compiling
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.registry import inspect_model
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import STAY, ModelSpec, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5
RING_3 = ParallelStrategy(ring_degree=3)
DEGREES = ("data_degree", "cfg_degree", "ring_degree", "ulysses_degree", "tensor_degree", "pipefusion_degree")
SPLITS = 16  # drawn for each number of ranks


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {**SIZES, "heads": 2, "double_blocks": 1}
    return str(write_tiny_flux(tmp_path_factory.mktemp("few_tokens") / "tiny.safetensors", **sizes))


def module_call(args, kwargs, times=1.0):
    return ModuleCall((args[0] * times, args[1]), dict(kwargs), len(args[0]), STAY, prompts=(0,))


def drawn_splits(path, ranks):
    """Draws strategies that the checks allow on `ranks` ranks, with or without device shares, and a call for each."""
    draw, shape, found = random.Random(ranks), inspect_model(path).shape, []
    while len(found) < SPLITS:
        degrees = {draw.choice(DEGREES): 2, draw.choice(DEGREES): 2} if ranks == 4 else {}
        if len(degrees) < 2:
            degrees = {draw.choice(DEGREES) if ranks == 2 else "ring_degree": ranks}
        strategy = ParallelStrategy(**degrees)
        if strategy.pipefusion_degree == 1:
            strategy = strategy.replace(shard_weights=draw.random() < 0.5)
        if draw.random() < 0.5:
            shares = tuple(draw.choice((1, 2, 30, 1000)) for _ in range(ranks))
            strategy = strategy.replace(device_shares=shares)
        size = draw.randint(1, 2), draw.randint(1, 6), draw.randint(1, 6)
        if not strategy.violations(shape, ranks):
            found.append((strategy, call(*size, text=draw.randint(1, 4))))
    return found


@torch.inference_mode()
def answers(world, path, splits):
    layouts, models, found = Layouts(world), {}, []
    for strategy, one in splits:
        if strategy.weights not in models:
            models[strategy.weights] = load_under(ModelSpec(path), layouts, strategy)
        forward = make_module_forward(models[strategy.weights], layouts, Placement(strategy))
        found.append(forward(module_call(*one)))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whatever_the_checks_let_through_gives_what_one_rank_gives(path, ranks):
    splits = drawn_splits(path, ranks)
    (expected,) = run_ranks(answers, 1, path, [(ParallelStrategy(), one) for _, one in splits])
    for rank, found in enumerate(run_ranks(answers, ranks, path, splits, backend=NCCL_STREAMS)):
        for (strategy, one), answer, alone in zip(splits, found, expected, strict=True):
            off = relative_difference(answer, alone)
            assert off <= TOLERANCE, f"rank {rank}, {strategy}, {one[0][0].shape}: {off:.2e}"


@torch.inference_mode()
def compiled_and_cached(world, path, strategy):
    """Returns (the answer, of compiled blocks if there are several ranks; blocks that ran uncompiled; answers under a
    step cache to calls of which some are alike; the number of reused calls)."""
    layouts, one = Layouts(world), call(1, 2, 2, text=1)
    model, mode = load_under(ModelSpec(path), layouts, strategy), "blocks" if world.world_size > 1 else "off"
    compiled = make_module_forward(model, layouts, Placement(strategy, "native", ComputeOptions(mode)))
    answer = compiled(module_call(*one))
    uncompiled = compiling.compiler().take().uncompiled
    forward, cache = make_module_forward(model, layouts, Placement(strategy)), ModuleCache(0.2)
    cached = [forward(module_call(*one, times), cache) for times in (1.0, -1.0, -0.9, 1.0)]
    return answer, uncompiled, torch.stack(cached), cache.reused


def test_compiled_blocks_and_the_step_cache_where_a_rank_has_no_tokens(path, monkeypatch):
    monkeypatch.setenv(COMPILE_BACKEND, "eager")
    ((answer, _, cached, reused),) = run_ranks(compiled_and_cached, 1, path, ParallelStrategy())
    assert 0 < reused < 3
    for compiled, uncompiled, found, reused_there in run_ranks(compiled_and_cached, 3, path, RING_3):
        assert uncompiled == 0 and relative_difference(compiled, answer) <= TOLERANCE
        assert reused_there == reused and relative_difference(found, cached) <= TOLERANCE
