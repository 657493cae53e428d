"""One image of a UNet in the real ComfyUI is computed in bands of rows; with patches of its blocks, by queries."""

from __future__ import annotations

from any_graphs import AnyGraph
from any_runs import assert_same, latents


def test_a_controlnet_reaches_each_band(comfy):
    graph = AnyGraph(comfy, "unet")
    writing = AnyGraph(comfy, "unet")
    writing.add("TestWriteModel", kind="unet_controlnet", folder="controlnet")
    comfy.run(writing.prompt, timeout=120)
    positive, negative, latent = graph.request()
    prompts = graph.controlled(positive, negative, "any_unet_controlnet.safetensors", width=48, height=64)
    request = (*prompts, latent)
    settings = {"steps": 2, "cfg": 1.0}
    stock = graph.stock()
    ours = graph.parallel(stock, "cpu:3", ulysses=3)
    sampler = graph.parallel_sampler([ours, 1], *request, **settings)
    ways = {
        "stock": graph.ksampler(stock, *request, **settings),
        "ours": graph.ksampler([ours, 0], *request, **settings),
        "without": graph.ksampler(stock, *graph.request(), **settings),
        "sampler": sampler,
    }
    found = latents(comfy, graph, ways, {"report": [sampler[0], 1]})
    report = found.pop("report")
    assert_same(found)
    assert_same({"stock": found["stock"], "ours": found["sampler"]})
    assert (found["without"] - found["stock"]).abs().max() > 0.1 * found["stock"].std()
    assert "strategy: bands 3: set by hand" in report
    assert "note: each of 3 devices computes a band of the image's rows" in report


def _patched(comfy, change) -> str:
    """Samples a UNet that `change(graph, model)` has changed, and asserts that three devices give stock's latent, with
    the change before Parallel Model and behind it. Returns the report of the first."""
    graph = AnyGraph(comfy, "unet")
    request, settings = graph.request(), {"steps": 2, "cfg": 3.0}
    stock = graph.stock()
    changed = change(graph, stock)
    sampler = graph.parallel_sampler([graph.parallel(changed, "cpu:3", ulysses=3), 1], *request, **settings)
    behind = change(graph, [graph.parallel(stock, "cpu:3", ulysses=3), 0])
    ways = {
        "stock": graph.ksampler(changed, *request, **settings),
        "ours": graph.ksampler(behind, *request, **settings),
        "without": graph.ksampler(stock, *request, **settings),
        "Parallel Sampler": sampler,
    }
    found = latents(comfy, graph, ways, {"report": [sampler[0], 1]})
    report = found.pop("report")
    assert_same(found)
    assert (found["without"] - found["stock"]).abs().max() > 0.01 * found["stock"].std()
    assert "result: exact" in report
    return report


def test_changed_weights_and_guidance_reach_each_band(comfy):
    def change(graph, model):
        weights = graph.add("UNetSelfAttentionMultiply", model=model, q=1.6, k=1.4, v=0.7, out=1.3)
        return [graph.add("RescaleCFG", model=[weights, 0], multiplier=0.7), 0]

    report = _patched(comfy, change)
    assert "strategy: bands 3: " in report
    assert "each of 3 devices computes a band of the image's rows" in report
    assert "share out the queries" not in report


def test_patches_of_core_nodes_have_the_whole_image_and_the_report_says_so(comfy):
    """They may look at all of it, so each device computes all but attention, and no earlier job's note on bands stays.
    tests/engine/bands/test_unet.py proves that attention is split; this image has too few keys for that."""

    def change(graph, model):
        freed = graph.add("FreeU_V2", model=model, b1=1.3, b2=1.4, s1=0.9, s2=0.2)
        return [graph.add("PerturbedAttentionGuidance", model=[freed, 0], scale=3.0), 0]

    report = _patched(comfy, change)
    assert "code of a node takes part in the network, so devices share out the queries of attention" in report
    assert "a band of the image's rows" not in report
