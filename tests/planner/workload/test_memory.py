"""Predicted memory, compared with closed forms, the loader's tensors, and the live bytes of real model calls."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from jobs import file_of
from parallel_backend.engine.blocks.step_cache import ModuleCache
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.models.base import Slices
from parallel_backend.models.comfyui.formats.slices import slice_blocks
from parallel_backend.models.diffusers import load as flux
from parallel_backend.models.diffusers.adapter import DiffusersFlux
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.keys import FLUX_DEV, FluxDims, diffusers_shapes
from parallel_backend.models.diffusers.memory import device_dtype, held_weights
from parallel_backend.models.dtypes import Dtypes
from parallel_backend.models.tokens.block_kinds import DIFFUSERS_FLUX
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.memory import predict_memory
from parallel_backend.planner.workload.rank_memory import COMMUNICATOR_BYTES
from parallel_backend.planner.workload.workload import Job
from parallel_backend.requests import WEIGHT_DTYPES, Conditioning, Placement, SampleRequest
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks
from tiny_flux import write_tiny_flux
from waiting import wait_until

GIB = 2**30
DEV = file_of(FLUX_DEV, "bfloat16")


def job_of(height: int, width: int, text: int = 512, file=DEV, weight_dtype="auto", **job) -> Job:
    """Returns a job. `height`, `width`: in latent pixels."""
    model = CheckpointModel(file, weight_dtype)
    return Job(model, **{"steps": 20} | job, text=text, height=8 * height, width=8 * width)


SQUARE = job_of(128, 128)  # 1024 x 1024


def most_private(job: Job, strategy: ParallelStrategy) -> int:
    return max(memory.private_bytes for memory in predict_memory(job, strategy))


def numbers(dims: FluxDims) -> int:
    return sum(torch.Size(shape).numel() for shape in diffusers_shapes(dims).values())


def weights_of(strategy: ParallelStrategy, dims: FluxDims = FLUX_DEV, **options) -> list[int]:
    dtypes = Dtypes.of("auto", "bfloat16", on_cpu=False)
    ranks = range(strategy.world_size)
    return [held_weights(dims, dtypes, strategy, rank, on_cpu=False, **options).private for rank in ranks]


def test_flux_dev_is_as_large_as_its_model_card_says():
    assert numbers(FLUX_DEV) == pytest.approx(11.9e9, rel=0.005)
    assert weights_of(ParallelStrategy()) == [2 * numbers(FLUX_DEV)]
    (alone,) = predict_memory(SQUARE, ParallelStrategy())
    assert alone.weights == 2 * numbers(FLUX_DEV)
    assert alone.private_bytes / GIB == pytest.approx(24.2, abs=0.3)
    assert alone.mapped == alone.host == 0


def test_what_patches_hold_lies_whole_on_each_rank():
    """A ControlNet's network takes 2 GiB on one device, and 2 GiB on each of two that split the work."""
    for strategy in (ParallelStrategy(), ParallelStrategy(ulysses_degree=2, shard_weights=True)):
        without = predict_memory(SQUARE, strategy)
        patched = predict_memory(replace(SQUARE, patch_bytes=2 * GIB), strategy)
        assert [m.weights - w.weights for m, w in zip(patched, without, strict=True)] == [2 * GIB] * len(
            without
        )


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_stages_of_a_pipeline_hold_all_blocks_once_and_what_is_around_them_each(stages):
    held = weights_of(ParallelStrategy(pipefusion_degree=stages))
    around = 2 * sum(
        torch.Size(shape).numel()
        for name, shape in diffusers_shapes(FLUX_DEV).items()
        if "transformer_blocks." not in name
    )
    assert sum(held) == 2 * numbers(FLUX_DEV) + (stages - 1) * around
    assert max(held) == held[0]  # double blocks come first, each twice as large as a single one


def test_larger_shares_mean_more_blocks():
    large, small = weights_of(ParallelStrategy(pipefusion_degree=2, device_shares=(2.0, 1.0)))
    assert large > 2 * small  # the first stage has the double blocks, each twice as large as a single one
    # A share of tokens changes activations, not weights.
    uneven = ParallelStrategy(ulysses_degree=2, device_shares=(2.0, 1.0))
    first, second = predict_memory(SQUARE, uneven)
    assert first.weights == second.weights and first.activations > 1.5 * second.activations


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_shards_add_up_to_the_model_and_offloading_moves_them_to_the_host(degree):
    strategy = ParallelStrategy(ulysses_degree=degree, shard_weights=True)
    whole = 2 * numbers(FLUX_DEV)
    assert whole <= sum(weights_of(strategy)) < 1.001 * whole
    shard = predict_memory(SQUARE, strategy)[0]
    offloaded = predict_memory(SQUARE, strategy.replace(offload_weights=True))[0]
    assert offloaded.host == weights_of(strategy)[0]
    assert shard.weights - offloaded.weights == offloaded.host
    # The layers around the blocks, a block that computes and the next one.
    assert 0 < offloaded.weights < 2 * GIB


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_slices_are_those_that_the_loader_takes(degree, dtype):
    dims = FluxDims(512, 4, 128, 2048, 2, 3, 64, 32, 64, 64, True)
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**flux.transformer_config(dims))
        module = DiffusersFlux(transformer, torch.bfloat16)
    slice_blocks(module, [DIFFUSERS_FLUX], Slices(degree, 0, lambda tensor: tensor, lambda tensor: tensor))
    stored = getattr(torch, dtype)
    expected = sum(
        parameter.numel()
        * (torch.bfloat16 if ".norm_" in name and dtype == "float8_e4m3fn" else stored).itemsize
        for name, parameter in transformer.named_parameters()
    )
    held = held_weights(
        dims,
        Dtypes.of("auto", dtype, on_cpu=False),
        ParallelStrategy(tensor_degree=degree),
        degree - 1,
        on_cpu=False,
    )
    assert held.private == expected


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("wish", WEIGHT_DTYPES)
def test_dtypes_are_those_that_the_loader_keeps(wish, stored, on_cpu):
    dtypes = Dtypes.of(wish, stored, on_cpu)
    chosen, as_stored = flux.choose_dtypes(wish, stored, torch.device("cpu" if on_cpu else "cuda"))
    assert chosen == dtypes
    for name in (
        "transformer_blocks.0.ff.net.2.weight",
        "transformer_blocks.0.ff.net.2.bias",
        "x_embedder.weight",
        "single_transformer_blocks.0.attn.norm_q.weight",
        "norm_out.linear.bias",
    ):
        loaded = flux.loaded_dtype(name, getattr(torch, stored), dtypes, as_stored)
        assert getattr(torch, device_dtype(name, dtypes)) == loaded


@pytest.mark.parametrize("axis", ["ulysses_degree", "ring_degree", "tensor_degree", "pipefusion_degree"])
def test_more_devices_never_take_more_memory_each(axis):
    peaks = [most_private(job_of(256, 256), ParallelStrategy(**{axis: degree})) for degree in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


def test_larger_jobs_take_more_memory_and_a_second_prompt_none_under_cfg_parallelism():
    def peak(strategy: ParallelStrategy | None = None, **job) -> int:
        job = job_of(**{"height": 128, "width": 128} | job)
        return most_private(job, strategy or ParallelStrategy())

    assert peak() < peak(batch=2) < peak(batch=3)
    assert peak() < peak(height=256)
    assert peak() < peak(text=1024)
    assert peak() < peak(prompts=2)
    # Two devices also have a communicator.
    assert peak(ParallelStrategy(cfg_degree=2), prompts=2) == peak() + COMMUNICATOR_BYTES


def test_fp8_halves_the_blocks_and_says_so_in_words():
    (whole,) = predict_memory(SQUARE, ParallelStrategy())
    (half,) = predict_memory(job_of(128, 128, weight_dtype="float8_e4m3fn"), ParallelStrategy())
    assert 0.5 < half.weights / whole.weights < 0.52
    assert "GiB (weights 11." in half.describe()


def test_on_the_cpu_weights_stay_in_the_file_that_all_ranks_share():
    (alone,) = predict_memory(
        job_of(128, 128, file=file_of(FLUX_DEV, "float32")), ParallelStrategy(), on_cpu=True
    )
    assert alone.weights == 0
    assert alone.mapped == 4 * numbers(FLUX_DEV)
    assert "; once for all processes, " in alone.describe()


# Live bytes: the most that torch's CPU allocator holds during a job, counted by torch's profiler. On a GPU,
# torch.cuda.max_memory_allocated counts the same.


def let_go(collective):
    """Makes `collective` return only once gloo's thread holds none of its tensors. That thread drops them a while after
    they arrive. If it is the last to hold them, the profiler, which follows one thread, does not see them freed."""

    def run(*args, **options):
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        held = [tensor._use_count() for tensor in tensors]
        collective(*args, **options)
        wait_until(lambda: [tensor._use_count() for tensor in tensors] == held)

    return run


def live_bytes(run) -> int:
    gc.collect()  # else an earlier job's garbage in cycles may be freed during this measurement and lower it
    # On processors that multiply bfloat16, oneDNN would reorder such weights into more memory.
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def sample_request(job: Job, context_dim: int) -> SampleRequest:
    def prompt() -> Conditioning:
        return Conditioning(
            torch.randn(1, job.text_tokens, context_dim), torch.randn(1, 32), torch.tensor([3.5])
        )

    noise = torch.randn(job.batch, 16, *job.latent_size)
    negative = prompt() if job.prompts == 2 else None
    sigmas = torch.linspace(1, 0, job.steps + 1)
    return SampleRequest(noise, sigmas, prompt(), negative, 1.0 + job.prompts)


def most_held(world, path, weight_dtypes, strategy, job) -> list[int]:
    layouts, held = Layouts(world), []
    dist.all_gather, dist.broadcast = let_go(dist.all_gather), let_go(dist.broadcast)
    request = sample_request(job, inspect_flux(path).dims.context_dim)
    for weight_dtype in weight_dtypes:
        jobs = PlainJobs(layouts, weight_dtype)
        cache = ModuleCache(0.0) if job.step_cache else None
        jobs.forward(path, Placement(strategy), cache)
        held.append(live_bytes(lambda: jobs.run(path, strategy, request, cache=cache)))  # noqa: B023, it runs here
    return held


FP32, BOTH = ("auto",), ("auto", "bfloat16")


# Cases with many patches or hops use wider layers, next to which their small buffers count less. The dtype changes the
# bytes of a number and no formula, so one job of one device and one of stages run in both.
@pytest.mark.parametrize(
    ("strategy", "job", "heads", "dtypes"),
    [
        (ParallelStrategy(), job_of(16, 24, 64, steps=2), 2, BOTH),
        (ParallelStrategy(), job_of(16, 24, 64, steps=3, step_cache=True), 2, FP32),
        (ParallelStrategy(), job_of(16, 24, 300, batch=2, prompts=2, steps=1), 2, FP32),
        (ParallelStrategy(cfg_degree=2), job_of(16, 24, 64, prompts=2, steps=1), 2, FP32),
        (ParallelStrategy(ring_degree=3), job_of(16, 24, 64, steps=1), 2, FP32),
        (ParallelStrategy(pipefusion_degree=2), job_of(16, 24, 64, steps=3), 2, BOTH),
        (
            ParallelStrategy(pipefusion_degree=2, warmup_steps=2),
            job_of(16, 24, 64, batch=3, steps=2),
            2,
            FP32,
        ),
        (ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=5), job_of(16, 24, 300, steps=3), 4, FP32),
        (
            ParallelStrategy(cfg_degree=2, pipefusion_degree=2),
            job_of(16, 24, 64, prompts=2, steps=3),
            3,
            FP32,
        ),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelStrategy) else None,
)
def test_a_job_holds_what_is_predicted(tmp_path, strategy, job, heads, dtypes):
    """benchmarks/memory.py covers Ulysses, Ring within stages, sharded and sliced layers instead: with those, gloo's
    threads keep the tensors that they moved."""
    path = write_tiny_flux(tmp_path / "x.safetensors", heads=heads, double_blocks=2, single_blocks=4)
    file = inspect_flux(path)
    held = run_ranks(most_held, strategy.world_size, str(path), dtypes, strategy, job, backend="gloo")
    for i, dtype in enumerate(dtypes):
        predicted = predict_memory(replace(job, model=CheckpointModel(file, dtype)), strategy, on_cpu=True)
        for measured, rank in zip(held, predicted, strict=True):
            assert rank.activations + rank.buffers == pytest.approx(measured[i], rel=0.1), rank.fullest
