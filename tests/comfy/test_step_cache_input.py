"""ParallelSampler's step cache in the real ComfyUI: what it says, and where it is refused or does nothing."""

from __future__ import annotations

import re

import pytest
import torch

from comfy_harness import relative_difference
from comfyui_client import PromptFailed
from graphs import Graph

HEUN = {"sampler_name": "heun", "steps": 6}  # its second call in a step is near the next step's first


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_dev.safetensors")


def _sampled(comfy, unet, strategy, **inputs) -> tuple[torch.Tensor, str]:
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", **strategy)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), **inputs)
    return comfy.sample_with_text(graph.prompt, latent, [latent[0], 1])


@pytest.fixture(scope="module")
def exact(comfy, unet):
    return _sampled(comfy, unet, {"ulysses": 2}, **HEUN)[0]


def test_reused_model_calls_are_counted_and_called_approximate(comfy, unet, exact):
    latent, report = _sampled(comfy, unet, {"ulysses": 2}, step_cache="first_block", **HEUN)
    found = re.search(
        r"step cache: (\d+) of 11 model calls reused .* \(threshold 0\.12\): approximate", report
    )
    assert found and 0 < int(found[1]) < 11
    assert "result: approximate (step cache" in report and "expected:" not in report
    assert 0 < relative_difference(latent, exact) < 0.3


def test_a_threshold_of_zero_is_exact_to_the_bit(comfy, unet, exact):
    latent, report = _sampled(
        comfy, unet, {"ulysses": 2}, step_cache="first_block", cache_threshold=0.0, **HEUN
    )
    assert torch.equal(latent, exact)
    assert "step cache: reuses nothing at threshold 0" in report and "result: exact" in report


def test_stepwise_it_does_nothing_and_says_so(comfy, unet):
    stepwise = {"sampler_name": "lms", "steps": 3}
    expected, _ = _sampled(comfy, unet, {"ulysses": 2}, **stepwise)
    latent, report = _sampled(comfy, unet, {"ulysses": 2}, step_cache="first_block", **stepwise)
    assert torch.equal(latent, expected)
    assert "note: step_cache did nothing" in report and "result: exact" in report


def test_with_pipefusion_it_is_refused_before_ranks_start(comfy, unet):
    before = comfy.ranks()
    with pytest.raises(PromptFailed) as raised:
        _sampled(comfy, unet, {"pipefusion": 2}, step_cache="first_block")
    for words in ("step_cache does not go with pipefusion_degree 2", "Set step_cache to off"):
        assert words in raised.value.exception_message
    assert set(comfy.ranks()) <= set(before)
