"""Nodes between a loader and a sampler that change what the model computes give the stock latent.

Two devices share the tokens, or the positive and the negative prompt. A stock latent without the node shows that the
node changes something.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from any_graphs import MODELS, AnyGraph
from any_runs import TOLERANCE, latents
from check_templates import NEWER_NODES
from comfy_harness import require_comfyui
from differences import relative_difference

Source = list


def skip_layers(graph: AnyGraph, model: Source) -> Source:
    settings = {"scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.3}
    return [
        graph.add("SkipLayerGuidanceDiT", model=model, double_layers="0", single_layers="1", **settings),
        0,
    ]


def skip_layers_of_the_negative(graph: AnyGraph, model: Source) -> Source:
    settings = {"double_layers": "1", "single_layers": "", "start_percent": 0.0, "end_percent": 1.0}
    return [graph.add("SkipLayerGuidanceDiTSimple", model=model, **settings), 0]


def skip_layers_of_sd3(graph: AnyGraph, model: Source) -> Source:
    settings = {"layers": "1, 2", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}
    return [graph.add("SkipLayerGuidanceSD3", model=model, **settings), 0]


def keep_references(graph: AnyGraph, model: Source) -> Source:
    return [graph.add("FluxKVCache", model=model), 0]


def smooth_seams(graph: AnyGraph, model: Source) -> Source:
    model = [graph.add("ModelSamplingSD3", model=model, shift=3.0), 0]  # samples like HiDream-O1
    settings = {"pattern": "single_shift", "passes": "2", "blend": "window", "strength": 1.0}
    return [
        graph.add("HiDreamO1PatchSeamSmoothing", model=model, start_percent=0.0, end_percent=1.0, **settings),
        0,
    ]


def style(graph: AnyGraph, model: Source) -> Source:
    patch = [graph.add("TestModelPatch", kind="uso"), 0]
    seen = [graph.add("TestSeenImage"), 0]
    return [graph.add("USOStyleReference", model=model, model_patch=patch, clip_vision_output=seen), 0]


# Each case: (function that adds the node, kind of model, sampler settings, degrees).
CASES: dict[str, tuple[Callable, str, dict, dict]] = {
    "SkipLayerGuidanceDiT": (skip_layers, "wan_t2v", {"cfg": 3.0}, {"ulysses": 2}),
    "SkipLayerGuidanceDiT, two lists": (skip_layers, "flux", {"cfg": 3.0}, {"ring": 2}),
    "SkipLayerGuidanceSD3": (skip_layers_of_sd3, "sd3", {"cfg": 3.0}, {"ulysses": 2}),
    "SkipLayerGuidanceDiTSimple": (skip_layers_of_the_negative, "wan_t2v", {"cfg": 3.0}, {"cfg": 2}),
    "FluxKVCache": (keep_references, "flux2", {"cfg": 1.0, "steps": 3}, {"ulysses": 2}),
    "HiDreamO1PatchSeamSmoothing": (smooth_seams, "flux", {"cfg": 1.0, "steps": 1}, {"ulysses": 2}),
    "USOStyleReference": (style, "flux", {"cfg": 1.0}, {"ring": 2}),
}
# The node leaves 32 rows and columns at each edge unchanged, so the latent must be larger than twice that.
LARGER = {smooth_seams: "{b},16,96,96"}


@pytest.mark.parametrize("case", CASES)
def test_a_node_that_changes_the_model_gives_the_stock_latent(comfy, case, monkeypatch):
    place, kind, settings, degrees = CASES[case]
    if place in LARGER:
        monkeypatch.setitem(MODELS, kind, MODELS[kind] | {"latent": LARGER[place]})
    graph = AnyGraph(comfy, kind)
    stock = graph.stock()
    ours = graph.parallel(stock, **degrees)
    request = graph.request()
    models = {"stock": place(graph, stock), "ours": place(graph, [ours, 0]), "without": stock}
    ways = {
        name: graph.ksampler(model, *request, **{"steps": 2, **settings}) for name, model in models.items()
    }
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["without"], found["stock"]) > 10 * TOLERANCE


def test_frames_that_come_one_after_the_other_give_the_stock_video(comfy):
    graph = AnyGraph(comfy, "wan_causal")
    stock = graph.stock()
    ours = graph.parallel(stock, ulysses=2)
    vae = [graph.add("TestWanVAE", channels=3), 0]
    image = [graph.add("EmptyImage", width=48, height=80, batch_size=1, color=9000), 0]
    size = {"width": 48, "height": 80, "length": 13, "batch_size": 1}
    text = graph.prompt_of(1)
    found = {}
    for name, model in (("stock", stock), ("ours", [ours, 0])):
        start = graph.add("ARVideoI2V", model=model, vae=vae, start_image=image, **size)
        for way, source in (("i2v", [start, 0]), ("t2v", model)):
            sigmas = graph.add("BasicScheduler", model=source, scheduler="simple", steps=2, denoise=1.0)
            guider = graph.add("BasicGuider", model=source, conditioning=text)
            parts = {
                "noise": [graph.add("RandomNoise", noise_seed=3), 0],
                "sampler": [graph.add("SamplerARVideo", num_frame_per_block=2), 0],
                "sigmas": [sigmas, 0],
                "guider": [guider, 0],
            }
            found[f"{name}-{way}"] = [graph.add("SamplerCustomAdvanced", latent_image=[start, 1], **parts), 0]
    found = latents(comfy, graph, found)
    for way in ("i2v", "t2v"):
        assert relative_difference(found[f"ours-{way}"], found[f"stock-{way}"]) <= TOLERANCE
    assert relative_difference(found["stock-i2v"], found["stock-t2v"]) > 10 * TOLERANCE


@pytest.mark.parametrize("speakers", [1, 2])
def test_speech_moves_the_same_lips(comfy, speakers):
    graph = AnyGraph(comfy, "wan_talk")
    stock = graph.stock()
    ours = graph.parallel(stock, ulysses=2)
    positive, negative = graph.prompt_of(1), graph.prompt_of(2)
    image = [graph.add("EmptyImage", width=64, height=80, batch_size=1, color=9000), 0]
    patch = [graph.add("TestModelPatch", kind="infinite talk"), 0]
    vae = [graph.add("TestWanVAE", channels=3), 0]

    def talking(model: Source, scale: float) -> Source:
        settings = {"width": 64, "height": 80, "length": 9, "motion_frame_count": 5, "audio_scale": scale}
        more = {"mode": "single_speaker"}
        if speakers == 2:
            half = [graph.add("SolidMask", value=1.0, width=32, height=80), 0]
            empty = [graph.add("SolidMask", value=0.0, width=64, height=80), 0]
            masks = [
                [graph.add("MaskComposite", destination=empty, source=half, x=x, y=0, operation="add"), 0]
                for x in (0, 32)
            ]
            more = {
                "mode": "two_speakers",
                "mode.audio_encoder_output_2": [graph.add("TestHeardSound", draw=8), 0],
                "mode.mask_1": masks[0],
                "mode.mask_2": masks[1],
            }
        node = graph.add(
            "WanInfiniteTalkToVideo", model=model, model_patch=patch, positive=positive, negative=negative, vae=vae,
            start_image=image, audio_encoder_output_1=[graph.add("TestHeardSound", draw=6), 0], **settings, **more,
        )  # fmt: skip
        return graph.ksampler([node, 0], [node, 1], [node, 2], [node, 3], steps=2, cfg=1.0)

    ways = {"stock": talking(stock, 1.0), "ours": talking([ours, 0], 1.0), "silent": talking(stock, 0.0)}
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["silent"], found["stock"]) > 10 * TOLERANCE


def test_a_preview_of_its_own_changes_no_latent(comfy):
    graph = AnyGraph(comfy, "hunyuan_3d")
    stock = graph.stock()
    ours = graph.parallel(stock, ring=2)
    request, ways = graph.request(), {}
    for name, model in (("stock", stock), ("ours", [ours, 0])):
        splat = graph.add("TestSplatModel", model=model)
        previewed = graph.add("TripoSplatSamplingPreview", model=[splat, 0], vae=[splat, 1], octree_level=3,
                              num_gaussians=1024, yaw=0.0, pitch=0.0, point_size=1)  # fmt: skip
        ways[name] = graph.ksampler([previewed, 0], *request, steps=2)
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE


def test_nodes_that_are_called_newer_are_not_in_this_comfyui(comfy):
    version = (require_comfyui() / "comfyui_version.py").read_text()
    if "0.30.0" not in version:
        pytest.skip(f"the list is about ComfyUI 0.30.0, and this one says {version}")
    assert not NEWER_NODES & set(comfy.registry)
