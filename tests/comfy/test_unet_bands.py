"""One image of a UNet in the real ComfyUI is computed in bands of rows, also with a ControlNet."""

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
