"""In a real browser, graphs of ComfyUI's template library that the command made parallel give the stock latents. Tiny
model files replace the real ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from any_graphs import write_model
from any_runs import TOLERANCE
from differences import relative_difference
from official_graphs import SmallGraph, kind_of

LOADERS = {"UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"}
GRAPHS = [
    "flux1_krea_dev", "flux_schnell", "flux_dev_full_text_to_image", "flux_kontext_dev_basic",
    "image_flux2_text_to_image", "image_flux2_klein_text_to_image",
    "image_qwen_image", "image_qwen_Image_2512", "image_qwen_image_edit_2509",
    "text_to_video_wan", "image_to_video_wan", "video_wan2_2_14B_t2v", "video_wan2_2_14B_i2v",
    "video_wan2_2_14B_flf2v", "video_wan2_2_5B_ti2v", "video_wan_vace_14B_t2v", "video_wan_vace_14B_ref2v",
    "ltxv_text_to_video", "video_ltx2_t2v", "video_ltx2_3_t2v",
    "hunyuan_video_text_to_video", "video_hunyuan_video_1.5_720p_t2v",
    "sd3.5_simple_example", "sdxl_simple_example", "sdxlturbo_example",
    "video_minimax_h3_t2v", "image_lens_t2i", "image_lens_turbo_t2i", "image_joyai_image_edit",
    "audio_stable_audio_example",
]  # fmt: skip
# Loads the workflow and returns the prompt that the page would send.
SENT = """async workflow => {
  await app.loadGraphData({ ...workflow, id: crypto.randomUUID() }, true, true, 'official');
  return (await app.graphToPrompt()).output;
}"""
MADE = """async () => {
  await app.extensionManager.command.execute('parallel_sampling.make_parallel');
  return (await app.graphToPrompt()).output;
}"""


def _library() -> Path:
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if found is None or not found.submodule_search_locations:
        pytest.skip("ComfyUI's template library is not installed")
    return Path(found.submodule_search_locations[0]) / "templates"


@pytest.mark.parametrize("name", GRAPHS)
def test_an_official_graph_gives_stocks_latents(page, measuring, name):
    comfy, _ = measuring
    stock = page.evaluate(SENT, json.loads((_library() / f"{name}.json").read_text("utf-8")))
    made = page.evaluate(MADE)
    loaders = sum(node["class_type"] in LOADERS for node in stock.values())
    assert sum(node["class_type"] == "ParallelModel" for node in made.values()) == loaders >= 1
    kind = kind_of(stock)
    file, latents = write_model(comfy, kind), {}
    for way, prompt in {"stock": stock, "made": made}.items():
        graph = SmallGraph(prompt, comfy.registry, kind, file)
        files = graph.save_all(graph.samplers(), way)
        comfy.run(graph.prompt, timeout=300)
        latents[way] = [load_file(comfy.output(file))["samples"] for file in files]
    (group,) = [group for group in comfy.groups() if group["state"] == "ready"]
    assert len(group["ranks"]) == 2 and file in json.dumps(group), "two processes computed it"
    assert latents["stock"] and len(latents["made"]) == len(latents["stock"])
    for found, expected in zip(latents["made"], latents["stock"], strict=True):
        assert expected.isfinite().all() and expected.std() > 1e-3
        assert relative_difference(found, expected) <= TOLERANCE
