"""In a real browser, graphs of ComfyUI's template library that the command made parallel give the stock latents. Tiny
model files replace the real ones."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import any_graphs
from any_graphs import AnyGraph
from any_runs import TOLERANCE, latents
from differences import relative_difference
from graphs import node

LOADERS = {"UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"}
# {tiny model of tests/support/tiny_model_files.py: the graphs in which it stands for the model files}
GRAPHS = {
    "flux": "flux1_krea_dev flux_schnell flux_dev_full_text_to_image flux_kontext_dev_basic",
    "flux2": "image_flux2_text_to_image image_flux2_klein_text_to_image",
    "qwen_image": "image_qwen_image image_qwen_Image_2512 image_qwen_image_edit_2509",
    "wan_t2v": "text_to_video_wan video_wan2_2_14B_t2v",
    "wan_i2v": "image_to_video_wan video_wan2_2_14B_i2v video_wan2_2_14B_flf2v",
    "wan_ti2v": "video_wan2_2_5B_ti2v",
    "wan_vace": "video_wan_vace_14B_t2v video_wan_vace_14B_ref2v",
    "ltx_video": "ltxv_text_to_video",
    "ltx_sound": "video_ltx2_t2v video_ltx2_3_t2v",
    "hunyuan_video": "hunyuan_video_text_to_video",
    "hunyuan_video_15": "video_hunyuan_video_1.5_720p_t2v",
    "sd3": "sd3.5_simple_example",
    "sdxl": "sdxl_simple_example sdxlturbo_example",
    "minimax": "video_minimax_h3_t2v",
    "lens": "image_lens_t2i image_lens_turbo_t2i",
    "joyimage": "image_joyai_image_edit",
    "sound": "audio_stable_audio_example",
}
# Loads the workflow and returns the prompt that the page would send.
SENT = """async workflow => {
  await app.loadGraphData({ ...workflow, id: crypto.randomUUID() }, true, true, 'official');
  return (await app.graphToPrompt()).output;
}"""
MADE = """async () => {
  await app.extensionManager.command.execute('parallel_sampling.make_parallel');
  return (await app.graphToPrompt()).output;
}"""


Prompt = dict[str, dict[str, Any]]
Link = list  # [node id, slot]

_FILE_INPUTS = ("unet_name", "ckpt_name")
_SIDE = 64  # pixels of a picture; its latent is an eighth
_SIZES = {"width": _SIDE, "height": _SIDE, "length": 9, "num_frames": 9, "steps": 2, "batch_size": 1}
_STEPS = {"qwen_image": 1}  # slow at its width of 3,072
# Two samplers in a row take one step each. The step between them may be a link in the graph.
_STEPS_OF_TWO = {
    "start_at_step": lambda step: int(step != 0),
    "end_at_step": lambda step: 10_000 if step == 10_000 else 1,
}
_DEGREES = {"sound": {"cfg": 2}}  # its tokens cannot be split
_VIDEOS = re.compile("video|frames|poses")
_SEVERAL = 9  # pictures of a video
# Nodes replaced by their input of this name: LoRA loaders, since the files are missing, and a latent upsampler.
_HANDED_ON = {"LoraLoaderModelOnly": "model", "LoraLoader": "model", "LTXVLatentUpsampler": "samples"}


class SmallGraph(AnyGraph):
    """Graphs of the library made small in the field `prompt`: with a tiny file, made-up prompts and made-up pictures.

    The nodes between a loader and a sampler stay unchanged, and so does the order of samplers. The nodes before and
    after them (text encoders, pictures, videos, saving) are left out.
    """

    def add(self, class_type: str, **inputs: Any) -> str:
        """Adds a node unless the same one is there already; returns its id."""
        name = f"{class_type} {sorted(inputs.items(), key=str)}"
        self.prompt[name] = node(class_type, **inputs)
        return name

    def samplers(self, way: str, original: Prompt) -> dict[str, Link]:
        """Adds each node that takes a model or a guider, and all that it needs, to `prompt`; returns their LATENTs by
        name. `original`: the graph as the page sends it; `way`: its name."""
        self._way, self._graph, self._nodes = way, original, self.comfy.registry
        found: dict[str, Link] = {}
        for name, original in self._graph.items():
            takes = {self._type_of(link) for link in _links(original)}
            if takes & {"MODEL", "GUIDER"} and self._outputs(name)[0] == "LATENT":
                found[f"{way}-{len(found)}"] = self._taken([name, 0])
        return found

    def _taken(self, link: Link, name: str = "") -> Link:
        """Returns the same output in `prompt`, or its stand-in. `name`: the input that it feeds."""
        source, slot = link
        original = self._graph[source]
        stand_in = self._stand_in(self._type_of(link), original, name)
        if stand_in is not None:
            return stand_in
        handed_on = _HANDED_ON.get(original["class_type"])
        if handed_on is not None:
            return self._taken(original["inputs"][handed_on], name)
        taken = f"{self._way} {source}"
        if taken not in self.prompt:
            self.prompt[taken] = node(original["class_type"])
            self.prompt[taken]["inputs"] = dict(self._inputs(original))
        return [taken, slot]

    def _inputs(self, original: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if original["class_type"] == "ParallelModel":
            yield "strategy", self.strategy("cpu:2", **_DEGREES.get(self.kind, {"ulysses": 2}))
        optional = self._nodes[original["class_type"]]["input"].get("optional", {})
        for name, value in original["inputs"].items():
            if name in _SIZES:
                yield name, _STEPS.get(self.kind, _SIZES[name]) if name == "steps" else _SIZES[name]
            elif name in _STEPS_OF_TWO:
                yield name, _STEPS_OF_TWO[name](value)
            elif not _is_link(value):
                yield name, value
            elif not (
                name in optional and self._type_of(value) in ("CLIP_VISION_OUTPUT", "AUDIO_ENCODER_OUTPUT")
            ):
                yield name, self._taken(value, name)

    def _stand_in(self, kind: str, original: Mapping[str, Any], name: str) -> Link | None:
        """Returns the stand-in for an output of this type, or None if the node itself stays."""
        takes = {self._type_of(link) for link in _links(original)}
        if kind == "MODEL" and set(_FILE_INPUTS) & set(original["inputs"]):
            return self.stock()
        if kind == "CONDITIONING" and "CLIP" in takes:
            return self.text_of(sum(map(ord, str(sorted(map(str, original["inputs"].values()))))) % 1000)
        if kind == "VAE":
            of_images = self.kind in ("flux", "sd3")  # all others get a VAE of Wan's kind
            return [self.add("TestImageVAE") if of_images else self.add("TestWanVAE", channels=3), 0]
        if kind == "IMAGE":
            several = _SEVERAL if _VIDEOS.search(name) else 1
            return [self.add("TestImage", width=_SIDE, height=_SIDE, batch=several, channels=3), 0]
        if kind == "MASK":
            return [self.add("SolidMask", value=1.0, width=_SIDE, height=_SIDE), 0]
        is_empty = original["class_type"].startswith("Empty")
        if kind == "LATENT" and (is_empty or ("VAE" in takes and "CONDITIONING" not in takes)):
            return self._latent(is_empty, "audio" in original["class_type"].lower())
        return None

    def _latent(self, is_empty: bool, is_sound: bool) -> Link:
        """Returns a random latent if the graph encodes a picture, else an empty one. LTX-2's graphs join both kinds."""
        shape = any_graphs.MODELS[self.kind]["latent"].format(b=1)
        if self.kind == "ltx_sound":
            shape = shape.split(";")[is_sound]
        return [self.add("TestShapedLatent", shape=shape, draw=-1 if is_empty or is_sound else 5), 0]

    def _outputs(self, name: str) -> list[str]:
        return self._nodes[self._graph[name]["class_type"]]["output"] or [""]

    def _type_of(self, link: Link) -> str:
        outputs = self._outputs(link[0])
        return outputs[link[1]] if link[1] < len(outputs) else ""


def _is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _links(original: Mapping[str, Any]) -> list[Link]:
    return [value for value in original["inputs"].values() if _is_link(value)]


def _library() -> Path:
    found = importlib.util.find_spec("comfyui_workflow_templates_json")
    if found is None or not found.submodule_search_locations:
        pytest.skip("ComfyUI's template library is not installed")
    return Path(found.submodule_search_locations[0]) / "templates"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in GRAPHS.items() for name in names.split()]
)
def test_an_official_graph_gives_stocks_latents(page, measuring, kind, name):
    stock = page.evaluate(SENT, json.loads((_library() / f"{name}.json").read_text("utf-8")))
    made = page.evaluate(MADE)
    loaders = sum(node["class_type"] in LOADERS for node in stock.values())
    assert sum(node["class_type"] == "ParallelModel" for node in made.values()) == loaders >= 1
    graph = SmallGraph(measuring, kind)
    ways = {"stock": graph.samplers("stock", stock), "made": graph.samplers("made", made)}
    assert ways["stock"]
    found = latents(measuring, graph, ways["stock"] | ways["made"])
    (group,) = [group for group in measuring.groups() if group["state"] == "ready"]
    assert len(group["ranks"]) == 2 and graph.file in json.dumps(group), "two processes computed it"
    for links in zip(ways["made"], ways["stock"], strict=True):
        ours, expected = (found[name] for name in links)
        assert expected.isfinite().all() and expected.std() > 1e-3
        assert relative_difference(ours, expected) <= TOLERANCE
