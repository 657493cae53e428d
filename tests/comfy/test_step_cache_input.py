"""The step cache in the real ComfyUI, as input of ParallelSampler and as a node: its reports, results and refusals."""

from __future__ import annotations

import re

import pytest
import torch

from any_graphs import AnyGraph
from any_runs import TOLERANCE, latents, refusal
from differences import relative_difference
from graphs import SAMPLING, Graph

HEUN = {"sampler_name": "heun", "steps": 6}  # its second call in a step is near the next step's first


def test_reused_model_calls_are_counted_and_a_threshold_of_zero_is_exact_to_the_bit(comfy, unet):
    graph = Graph()
    loader, request = graph.parallel_loader(unet, "cpu:2", ulysses=2), graph.request()
    ways = {"off": graph.parallel_sampler(loader, *request, **HEUN)}
    for name, threshold in (("never", 0.0), ("cached", 0.4)):
        caching = {"step_cache": "first_block", "cache_threshold": threshold}
        ways[name] = graph.parallel_sampler(loader, *request, **HEUN | caching)
    found = latents(comfy, graph, ways, {f"{name} report": [node, 1] for name, (node, _) in ways.items()})
    report = found["cached report"]
    words = r"step cache: (\d+) of \d+ model calls reused .* \(threshold 0\.4\): approximate"
    counted = re.search(words, report)
    assert counted and 0 < int(counted[1]) < 11, report
    assert "result: approximate (step cache" in report and "expected:" not in report
    assert 0 < relative_difference(found["cached"], found["off"]) < 0.3
    assert torch.equal(found["never"], found["off"])
    report = found["never report"]
    assert "step cache: reuses nothing at threshold 0" in report and "result: exact" in report


def test_with_pipefusion_it_is_refused_before_ranks_start(comfy, unet):
    before = comfy.ranks()
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", pipefusion=2)
    latent = graph.parallel_sampler(loader, *graph.request(), step_cache="first_block")
    words = "step_cache does not go with pipefusion_degree 2.*Set step_cache to off"
    refusal(comfy, graph, latent, words)
    assert set(comfy.ranks()) <= set(before)


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
        "Parallel Sampler": graph.parallel_sampler(
            [ours, 1], *request, step_cache="first_block", cache_threshold=0.3, **sampling
        ),
    }
    found = latents(comfy, graph, ways)
    assert torch.equal(found["never"], found["off"])
    assert relative_difference(found["cached"], found["Parallel Sampler"]) <= TOLERANCE
    assert relative_difference(found["cached"], found["off"]) > 10 * TOLERANCE


def test_prove_it_compares_a_cached_sampler_with_every_step_of_one_device(comfy):
    """With this threshold all steps but the first reuse the blocks."""
    graph = AnyGraph(comfy, "flux")
    ours = graph.parallel(graph.stock(), ulysses=2)
    positive, negative, latent = graph.request()
    inputs = {"positive": positive, "negative": negative, "latent_image": latent}
    proof = graph.add(
        "ProveSampler",
        sampler_class="KSampler",
        vae=[graph.add("TestTinyVAE"), 0],
        model=[graph.add("ParallelStepCache", model=[ours, 0], cache_threshold=10.0), 0],
        **inputs,
        **SAMPLING | {"steps": 6},
    )
    report = comfy.run(graph.prompt)["outputs"][proof]["text"][0]
    (difference,) = re.findall(r"^of the latents: (\S+), which", report, re.MULTILINE)
    assert float(difference) > 1e-2
    assert "step cache: 5 of 6 model calls reused" in report


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (False, "Put Parallel Step Cache behind Parallel Model"),
        (True, "does not go with pipefusion_degree 2.*take Parallel Step Cache out"),
    ],
)
def test_the_node_refuses_stock_models_and_pipefusion_before_anything_starts(comfy, parallel, words):
    graph = AnyGraph(comfy, "wan_t2v")
    model = [graph.parallel(graph.stock(), pipefusion=2), 0] if parallel else graph.stock()
    cached = [graph.add("ParallelStepCache", model=model, cache_threshold=0.1), 0]
    failure = refusal(comfy, graph, graph.ksampler(cached, *graph.request()), words)
    assert failure.node_type == "ParallelStepCache"
