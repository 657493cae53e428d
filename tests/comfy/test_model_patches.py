"""Nodes between a loader and a sampler that change what the model computes give the stock latent.

Each is put before and behind Parallel Model. A stock latent without the node shows that the node changes something.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from any_graphs import MODELS, AnyGraph
from any_runs import TOLERANCE, compared, latents, with_change
from check_templates import NEWER_NODES
from comfy_harness import require_comfyui
from differences import relative_difference
from graphs import inputs_of
from tiny_model_files import write_tiny

Source = list
Change = Callable[[AnyGraph, Source], Source]


def node(name: str, **inputs) -> Change:
    """Returns a function that puts a node behind a model; inputs that are not named have ComfyUI's defaults."""

    def add(graph: AnyGraph, model: Source) -> Source:
        known = inputs_of(graph.comfy.registry[name])
        usual = {
            field: options["default"]
            for field, _, options, needed in known
            if needed and "default" in options
        }
        return [graph.add(name, **usual | inputs | {"model": model}), 0]

    return add


def style(graph: AnyGraph, model: Source) -> Source:
    patch = [graph.add("TestModelPatch", kind="uso"), 0]
    seen = [graph.add("TestSeenImage"), 0]
    return [graph.add("USOStyleReference", model=model, model_patch=patch, clip_vision_output=seen), 0]


BANDS = {"devices": "cpu:3", "ulysses": 3}
ALWAYS = {"start_percent": 0.0, "end_percent": 1.0}
SKIP = node(
    "SkipLayerGuidanceDiT", double_layers="0", single_layers="1", scale=3.0, rescaling_scale=0.3, **ALWAYS
)


def case(
    kind: str, *changes: Change, degrees: dict | None = None, **settings
) -> tuple[str, Change, dict, dict]:
    """Returns (kind of model, the changes in a row, degrees, sampler settings)."""

    def change(graph: AnyGraph, model: Source) -> Source:
        for one in changes:
            model = one(graph, model)
        return model

    return kind, change, degrees or {"ulysses": 2}, {"steps": 2, "cfg": 3.0, **settings}


CASES = {
    "SkipLayerGuidanceDiT": case("wan_t2v", SKIP),
    "SkipLayerGuidanceDiT, two lists": case("flux", SKIP, degrees={"ring": 2}),
    "SkipLayerGuidanceDiTSimple": case(
        "wan_t2v",
        node("SkipLayerGuidanceDiTSimple", double_layers="1", single_layers="", **ALWAYS),
        degrees={"cfg": 2},
    ),
    "shift, wrapper and guidance": case(
        "wan_t2v",
        node("ModelSamplingSD3", shift=2.0),
        node("TestWrapper", scale=0.5),
        node("RescaleCFG", multiplier=0.6),
    ),
    # These two keep state in the model's options.
    "ContextWindowsManual": case(
        "wan_t2v", node("ContextWindowsManual", dim="2", context_length=2, context_overlap=1)
    ),
    "EasyCache": case(
        "wan_t2v",
        node("EasyCache", reuse_threshold=3.0, start_percent=0.2, end_percent=0.9, verbose=False),
        steps=6,
    ),
    "SkipLayerGuidanceSD3": case("sd3", node("SkipLayerGuidanceSD3", layers="1, 2", scale=3.0, **ALWAYS)),
    "FluxKVCache": case("flux2", node("FluxKVCache"), cfg=1.0, steps=3),
    "HiDreamO1PatchSeamSmoothing": case(
        "flux",
        node("ModelSamplingSD3", shift=3.0),  # samples like HiDream-O1
        node(
            "HiDreamO1PatchSeamSmoothing",
            pattern="single_shift",
            passes="2",
            blend="window",
            strength=1.0,
            **ALWAYS,
        ),
        cfg=1.0,
        steps=1,
    ),
    "USOStyleReference": case("flux", style, degrees={"ring": 2}, cfg=1.0),
    # Discrete steps, the last of them pure noise (zsnr).
    "ModelSamplingDiscrete": case(
        "unet",
        node("ModelSamplingDiscrete", sampling="v_prediction", zsnr=True),
        degrees={"cfg": 2},
        sampler_name="dpmpp_2m_sde",
    ),
    "weights and guidance of a UNet in bands": case(
        "unet",
        node("UNetSelfAttentionMultiply", q=1.6, k=1.4, v=0.7, out=1.3),
        node("RescaleCFG", multiplier=0.7),
        degrees=BANDS,
    ),
    # They may look at all of the image, so each device computes all but attention. tests/engine/bands/test_unet.py
    # proves that attention is split; this image has too few keys for that.
    "patches of a UNet's blocks": case(
        "unet",
        node("FreeU_V2", b1=1.3, b2=1.4, s1=0.9, s2=0.2),
        node("PerturbedAttentionGuidance", scale=3.0),
        degrees=BANDS,
    ),
}
IN_BANDS = "note: each of 3 devices computes a band of the image's rows"
BY_QUERIES = "code of a node takes part in the network, so devices share out the queries of attention"
# Words that the report has, and words that it has not.
NOTES = {
    "weights and guidance of a UNet in bands": (IN_BANDS, BY_QUERIES),
    "patches of a UNet's blocks": (BY_QUERIES, IN_BANDS),
}
# The node leaves 32 rows and columns at each edge unchanged, so the latent must be larger than twice that.
LARGER = {"HiDreamO1PatchSeamSmoothing": "{b},16,96,96"}


@pytest.mark.parametrize("name", CASES)
def test_a_node_that_changes_the_model_gives_the_stock_latent(comfy, name, monkeypatch):
    kind, change, degrees, settings = CASES[name]
    if name in LARGER:
        monkeypatch.setitem(MODELS, kind, MODELS[kind] | {"latent": LARGER[name]})
    found = with_change(comfy, AnyGraph(comfy, kind), change, degrees, **settings)
    assert "result: exact" in found["report"]
    if name in NOTES:
        said, unsaid = NOTES[name]
        assert said in found["report"] and unsaid not in found["report"]


def test_a_controlnet_reaches_each_band_of_a_unet(comfy):
    graph, name = AnyGraph(comfy, "unet"), "any_unet_controlnet.safetensors"
    write_tiny(comfy.models("controlnet") / name, "unet_controlnet")
    positive, negative, latent = graph.request()
    prompts = graph.controlled(positive, negative, name, width=48, height=64)
    stock, settings = graph.stock(), {"steps": 2, "cfg": 1.0}
    ours = graph.parallel(stock, **BANDS)
    models = {"stock": stock, "ours": [ours, 0], "Parallel Sampler": [ours, 1]}
    ways = graph.sampled_by(models, (*prompts, latent), **settings)
    ways["without"] = graph.ksampler(stock, positive, negative, latent, **settings)
    report = compared(comfy, graph, ways)["report"]
    assert "strategy: bands 3: set by hand" in report and IN_BANDS in report


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
            guider = graph.add("BasicGuider", model=source, conditioning=text)
            sampler = graph.add("SamplerARVideo", num_frame_per_block=2)
            found[f"{name}-{way}"] = [graph.custom_sampler(source, guider, sampler, [start, 1], steps=2), 0]
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

    ways = {"stock": talking(stock, 1.0), "ours": talking([ours, 0], 1.0), "without": talking(stock, 0.0)}
    compared(comfy, graph, ways)


def test_an_attribute_that_a_node_adds_is_gone_before_the_next_job(comfy):
    graph = AnyGraph(comfy, "flux")
    stock, request = graph.stock(), graph.request()
    ours = [graph.parallel(stock, ulysses=2), 0]
    for factor in (0.9, 0.8):
        models = {
            name: [graph.add("TestNewAttribute", model=model, factor=factor), 0]
            for name, model in (("stock", stock), ("ours", ours))
        }
        compared(comfy, graph, graph.sampled_by(models | {"without": stock}, request, steps=2))


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
    compared(comfy, graph, ways)


def test_nodes_that_are_called_newer_are_not_in_this_comfyui(comfy):
    version = (require_comfyui() / "comfyui_version.py").read_text()
    if "0.30.0" not in version:
        pytest.skip(f"the list is about ComfyUI 0.30.0, and this one says {version}")
    assert not NEWER_NODES & set(comfy.registry)
