"""One image of a UNet in the real ComfyUI is computed in bands of rows; with patches of its blocks, by queries."""

from __future__ import annotations

from any_graphs import AnyGraph
from any_runs import compared, with_change
from tiny_model_files import write_tiny

BANDS = {"devices": "cpu:3", "ulysses": 3}


def test_a_controlnet_reaches_each_band(comfy):
    graph = AnyGraph(comfy, "unet")
    name = "any_unet_controlnet.safetensors"
    write_tiny(comfy.server.base_directory / "models" / "controlnet" / name, "unet_controlnet")
    positive, negative, latent = graph.request()
    prompts = graph.controlled(positive, negative, name, width=48, height=64)
    settings = {"steps": 2, "cfg": 1.0}
    stock = graph.stock()
    ours = graph.parallel(stock, **BANDS)
    ways = {
        "stock": graph.ksampler(stock, *prompts, latent, **settings),
        "ours": graph.ksampler([ours, 0], *prompts, latent, **settings),
        "without": graph.ksampler(stock, positive, negative, latent, **settings),
        "Parallel Sampler": graph.parallel_sampler([ours, 1], *prompts, latent, **settings),
    }
    report = compared(comfy, graph, ways)["report"]
    assert "strategy: bands 3: set by hand" in report
    assert "note: each of 3 devices computes a band of the image's rows" in report


def _patched(comfy, change) -> str:
    """Asserts that three devices give stock's latent of a changed UNet, and returns the report."""
    report = with_change(comfy, AnyGraph(comfy, "unet"), change, BANDS, steps=2, cfg=3.0)["report"]
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
