"""Exchanges that run beside computing: the same bits, on request, and nothing left behind by a call that failed."""

from __future__ import annotations

import os

import pytest
import torch

from flux_requests import BLOCKS, CASES, CONTEXT, POOLED
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.factory import make_forward
from parallel_backend.errors import RequestError
from parallel_backend.models.diffusers.load import load
from parallel_backend.models.diffusers.sending import SendingProcessor
from parallel_backend.options import OVERLAP, overlaps
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tiny_flux import write_tiny_flux

CASE = CASES["odd sides, cfg 4, batch 3"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = dict(heads=4, double_blocks=BLOCKS, single_blocks=BLOCKS, context_dim=CONTEXT, pooled_dim=POOLED)
    return str(write_tiny_flux(tmp_path_factory.mktemp("overlap") / "tiny.safetensors", **sizes))


def sample_both_ways(world, path, strategy):
    """(latents, times that something was sent early) without overlap and with it."""
    model, layouts, found = load(ModelSpec(path), world.device), Layouts(world), []
    sent, send = [], SendingProcessor.send
    SendingProcessor.send = lambda *args: (sent.append(1), send(*args))[1]
    for overlap in ("off", "on", "on"):
        os.environ[OVERLAP] = overlap
        forward = make_forward(model, layouts, Placement(strategy))
        before = len(sent)
        latent = denoise(forward, CASE, lambda i, denoised: None)
        found.append((latent, len(sent) - before))
    return found


@pytest.mark.parametrize(
    "strategy",
    [ParallelStrategy(ulysses_degree=2), ParallelStrategy(ulysses_degree=2, ring_degree=2)],
    ids=lambda strategy: strategy.describe(),
)
def test_the_latent_is_the_same_to_the_bit(path, strategy):
    for plain, *overlapped in run_ranks(sample_both_ways, strategy.world_size, path, strategy):
        assert plain[1] == 0
        for latent, sent in overlapped:
            assert sent > 0 and torch.equal(latent, plain[0])


def fail_after_sending(world, path):
    """What the attentions hold after a call whose feed-forward layer failed, and whether the next one succeeds."""
    os.environ[OVERLAP] = "on"
    model = load(ModelSpec(path), world.device)
    forward = make_forward(model, Layouts(world), Placement(ParallelStrategy(ulysses_degree=2)))
    block = model.blocks[0][-1]
    layer, block.act_mlp = block.act_mlp, None
    try:
        denoise(forward, CASE, lambda i, denoised: None)
    except TypeError as error:
        failure = str(error)
    held = [module.attn.processor._sent for module in model.blocks[0]]
    block.act_mlp = layer
    denoise(forward, CASE, lambda i, denoised: None)
    return failure, sum(sent is not None for sent in held)


def test_a_call_that_failed_leaves_nothing_on_its_way(path):
    # Over gloo: what a failed call has sent is dropped, and nobody waits for it.
    for failure, held in run_ranks(fail_after_sending, 2, path, backend="gloo"):
        assert "not callable" in failure and held == 0


@pytest.mark.parametrize(
    ("device", "variable", "expected"),
    [
        ("cpu", None, False),
        ("cuda", None, True),
        ("cpu", "on", True),
        ("cuda", "off", False),
    ],
)
def test_gpus_overlap_and_a_variable_outranks_that(device, variable, expected):
    assert overlaps(device, {} if variable is None else {OVERLAP: variable}) is expected


def test_another_value_of_the_variable_is_refused():
    with pytest.raises(RequestError, match="PARALLEL_SAMPLING_OVERLAP is 'yes'"):
        overlaps("cpu", {OVERLAP: "yes"})
