"""ParallelSampler's step cache in the real ComfyUI: what it says, and where it is refused or does nothing."""

from __future__ import annotations

import re

import pytest
import torch

from any_graphs import AnyGraph
from any_runs import TOLERANCE, latents
from comfyui_client import PromptFailed
from differences import relative_difference
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


def _patched(comfy, sampler_name, **inputs) -> tuple[torch.Tensor, str]:
    """With a node that has the model called twice a step, the second time without a layer: ComfyUI runs the loop."""
    graph = AnyGraph(comfy, "wan_t2v")
    settings = {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.3}
    skipping = graph.add(
        "SkipLayerGuidanceDiT", model=graph.stock(), double_layers="1", single_layers="1", **settings
    )
    ours = graph.parallel([skipping, 0], ulysses=2)
    request = graph.request()
    latent = graph.parallel_sampler([ours, 1], *request, cfg=3.0, sampler_name=sampler_name, **inputs)
    return comfy.sample_with_text(graph.prompt, latent, [latent[0], 1])


def test_with_a_changed_model_in_comfyuis_loop_each_kind_of_call_reuses_its_own(comfy):
    cached = {"steps": 8, "step_cache": "first_block"}
    exact, _ = _patched(comfy, "euler", steps=8)
    never, _ = _patched(comfy, "euler", cache_threshold=0.0, **cached)
    assert torch.equal(never, exact)
    latent, report = _patched(comfy, "euler", cache_threshold=0.3, **cached)
    found = re.search(
        r"step cache: (\d+) of 16 model calls reused .* \(threshold 0\.3\): approximate", report
    )
    assert "way: stepwise" in report and found and 0 < int(found[1]) < 15, report
    assert "result: approximate (step cache" in report and "left out nothing" not in report
    assert 0 < relative_difference(latent, exact) < 0.5


def test_a_sampler_that_looks_twice_at_a_noise_level_is_left_whole_and_the_report_says_so(comfy):
    _, report = _patched(comfy, "heun", steps=3, step_cache="first_block", cache_threshold=0.001)
    assert "note: step_cache left out nothing of some model calls: the sampler, or a node, asks for" in report


def test_a_stock_sampler_with_the_node_reuses_what_parallel_sampler_reuses(comfy):
    graph = AnyGraph(comfy, "wan_t2v")
    ours = graph.parallel(graph.stock(), ulysses=2)
    request, sampling = graph.request(), {"steps": 8, "cfg": 3.0, "sampler_name": "euler"}
    caching = {
        threshold: [graph.add("ParallelStepCache", model=[ours, 0], cache_threshold=threshold), 0]
        for threshold in (0.0, 0.3)
    }
    ways = {
        "off": graph.ksampler([ours, 0], *request, **sampling),
        "never": graph.ksampler(caching[0.0], *request, **sampling),
        "cached": graph.ksampler(caching[0.3], *request, **sampling),
        "resident": graph.parallel_sampler(
            [ours, 1], *request, step_cache="first_block", cache_threshold=0.3, **sampling
        ),
    }
    found = latents(comfy, graph, ways)
    assert torch.equal(found["never"], found["off"])
    assert relative_difference(found["cached"], found["resident"]) <= TOLERANCE
    assert relative_difference(found["cached"], found["off"]) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ("UNETLoader", "Put Parallel Step Cache behind Parallel Model"),
        ("ParallelFluxLoader", "set its step_cache"),
    ],
)
def test_the_node_refuses_what_it_can_do_nothing_for(comfy, unet, loader, words):
    graph = Graph()
    named = {"unet_name": unet, "weight_dtype": "default" if loader == "UNETLoader" else "auto"}
    model = [graph.add(loader, **named), int(loader != "UNETLoader")]
    cached = [graph.add("ParallelStepCache", model=model, cache_threshold=0.1), 0]
    latent = graph.ksampler(cached, graph.text(1), graph.text(2), graph.latent())
    with pytest.raises(PromptFailed) as raised:
        comfy.sample(graph.prompt, latent)
    assert words in raised.value.exception_message


def test_the_node_refuses_pipefusion_before_anything_starts(comfy):
    graph = AnyGraph(comfy, "wan_t2v")
    ours = graph.parallel(graph.stock(), pipefusion=2)
    cached = [graph.add("ParallelStepCache", model=[ours, 0], cache_threshold=0.1), 0]
    latent = graph.ksampler(cached, *graph.request())
    with pytest.raises(PromptFailed) as raised:
        comfy.sample(graph.prompt, latent)
    assert raised.value.node_type == "ParallelStepCache"
    for words in ("does not go with pipefusion_degree 2", "take Parallel Step Cache out"):
        assert words in raised.value.exception_message
