"""One image of a UNet in the real ComfyUI is computed in bands of rows, with a ControlNet and core nodes' patches."""

from __future__ import annotations

from any_graphs import AnyGraph
from any_runs import assert_same, latents


def _with_controlnet(comfy) -> tuple[AnyGraph, tuple]:
    graph = AnyGraph(comfy, "unet")
    writing = AnyGraph(comfy, "unet")
    writing.add("TestWriteModel", kind="unet_controlnet", folder="controlnet")
    comfy.run(writing.prompt, timeout=120)
    positive, negative, latent = graph.request()
    applied = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=[graph.add("ControlNetLoader", control_net_name="any_unet_controlnet.safetensors"), 0],
        image=[graph.add("EmptyImage", width=48, height=64, batch_size=1, color=0x804020), 0],
        strength=0.7,
        start_percent=0.0,
        end_percent=1.0,
    )
    return graph, ([applied, 0], [applied, 1], latent)


def test_a_controlnet_reaches_each_band(comfy):
    graph, request = _with_controlnet(comfy)
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


def test_patches_of_core_nodes_reach_each_band(comfy):
    graph = AnyGraph(comfy, "unet")
    request, settings = graph.request(), {"steps": 2, "cfg": 1.0}
    stock = graph.stock()
    ours = [graph.parallel(stock, "cpu:3", ulysses=3), 0]

    def patched(model):
        freed = graph.add("FreeU_V2", model=model, b1=1.3, b2=1.4, s1=0.9, s2=0.2)
        return [graph.add("PerturbedAttentionGuidance", model=[freed, 0], scale=3.0), 0]

    ways = {
        "stock": graph.ksampler(patched(stock), *request, **settings),
        "ours": graph.ksampler(patched(ours), *request, **settings),
        "without": graph.ksampler(stock, *request, **settings),
    }
    found = latents(comfy, graph, ways)
    assert_same({name: found[name] for name in ("stock", "ours")})
    assert (found["without"] - found["stock"]).abs().max() > 0.01 * found["stock"].std()
