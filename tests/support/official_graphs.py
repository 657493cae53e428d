"""Graphs of ComfyUI's template library made small: they get tiny files, made-up prompts and made-up pictures.

The nodes between a loader and a sampler stay unchanged, and so does the order of samplers. The nodes before and after
them (text encoders, pictures, videos, saving) are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from any_graphs import CHECKPOINTS, MODELS

Prompt = dict[str, dict[str, Any]]
Link = list  # [node id, slot]

# Part of a file's name -> tiny file of the same class (tests/comfy/inject_nodes/tiny_models.py). First match wins.
_KINDS = (
    (r"flux2|flux-2", "flux2"),
    (r"flux1|flux_1", "flux"),
    (r"qwen_image", "qwen_image"),
    (r"vace", "wan_vace"),
    (r"ti2v_5b", "wan_ti2v"),
    (r"wan.*i2v", "wan_i2v"),
    (r"wan", "wan_t2v"),
    (r"hunyuanvideo1\.5", "hunyuan_video_15"),
    (r"hunyuan_video", "hunyuan_video"),
    (r"ltx-2", "ltx_sound"),
    (r"ltx-video", "ltx_video"),
    (r"minimax_h3", "minimax"),
    (r"sd3\.5", "sd3"),
    (r"sd_xl|sdxl", "sdxl"),
    (r"stable-audio", "sound"),
    (r"lens", "lens"),
    (r"joyai|joyimage", "joyimage"),
)
_FILE_INPUTS = ("unet_name", "ckpt_name")
_VAES = dict.fromkeys(("flux", "sd3"), "TestImageVAE")  # all others get a VAE of Wan's kind
_SIDE = 64  # pixels of a picture; its latent is an eighth
_SIZES = {"width": _SIDE, "height": _SIDE, "length": 9, "num_frames": 9, "steps": 2, "batch_size": 1}
# Two samplers in a row take one step each. The step between them may be a link in the graph.
_STEPS_OF_TWO = {
    "start_at_step": lambda step: int(step != 0),
    "end_at_step": lambda step: 10_000 if step == 10_000 else 1,
}
_AXES = ("cfg", "pipefusion", "ring", "ulysses", "data")
_TWO_DEVICES = {
    "mode": "manual",
    "devices": "cpu:2",
    "engine": "auto",
    **{f"{axis}_degree": 1 for axis in _AXES},
}
_ULYSSES = {"ulysses_degree": 2}
_DEGREES = {"sound": {"cfg_degree": 2}}  # its tokens cannot be split
_VIDEOS = re.compile("video|frames|poses")
_SEVERAL = 9  # pictures of a video
# Nodes replaced by their input of this name: LoRA loaders, since the files are missing, and a latent upsampler.
_HANDED_ON = {"LoraLoaderModelOnly": "model", "LoraLoader": "model", "LTXVLatentUpsampler": "samples"}


def kind_of(prompt: Prompt) -> str:
    """Returns the tiny model that stands for a graph's models. Raises LookupError if there is none, or several."""
    names = {
        value for node in prompt.values() for name, value in node["inputs"].items() if name in _FILE_INPUTS
    }
    kinds = {next((kind for part, kind in _KINDS if re.search(part, name.lower())), name) for name in names}
    if len(kinds) != 1 or not kinds <= set(MODELS):
        raise LookupError(f"no tiny model for {sorted(names)}")
    return kinds.pop()


class SmallGraph:
    """Builds the small version of a graph in the field `prompt`. The argument `prompt`: a graph as the page sends it;
    `nodes`: the answer of /object_info; `file`: name of the tiny model's file."""

    def __init__(self, prompt: Prompt, nodes: Mapping[str, Any], kind: str, file: str) -> None:
        self.prompt: Prompt = {}
        self._graph, self._nodes, self._kind, self._file = prompt, nodes, kind, file

    def samplers(self) -> list[Link]:
        """Adds each node that takes a model or a guider, and all that it needs, to `prompt`; returns their LATENTs."""
        found = []
        for name, node in self._graph.items():
            takes = {self._type_of(link) for link in _links(node)}
            if takes & {"MODEL", "GUIDER"} and self._outputs(name)[0] == "LATENT":
                found.append(self._taken([name, 0]))
        return found

    def save_all(self, latents: list[Link], label: str) -> list[str]:
        """Adds a node that saves each latent; returns the file names."""
        files = []
        for number, latent in enumerate(latents):
            files.append(f"official-{label}-{number}.safetensors")
            if ";" in MODELS[self._kind]["latent"]:
                latent = [self._add("TestFlatLatent", latent=latent), 0]
            self._add("TestSaveLatent", latent=latent, path=files[-1])
        return files

    def _taken(self, link: Link, name: str = "") -> Link:
        """Returns the same output in `prompt`, or its stand-in. `name`: the input that it feeds."""
        source, slot = link
        node, kind = self._graph[source], self._type_of(link)
        stand_in = self._stand_in(kind, node, name)
        if stand_in is not None:
            return stand_in
        handed_on = _HANDED_ON.get(node["class_type"])
        if handed_on is not None:
            return self._taken(node["inputs"][handed_on], name)
        if source not in self.prompt:
            self.prompt[source] = {"class_type": node["class_type"], "inputs": {}}
            self.prompt[source]["inputs"] = dict(self._inputs(node))
        return [source, slot]

    def _inputs(self, node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        if node["class_type"] == "ParallelModel":
            yield (
                "strategy",
                [self._once("StrategySelector", **_TWO_DEVICES | _DEGREES.get(self._kind, _ULYSSES)), 0],
            )
        optional = self._nodes[node["class_type"]]["input"].get("optional", {})
        for name, value in node["inputs"].items():
            if name in _SIZES:
                yield name, _SIZES[name]
            elif name in _STEPS_OF_TWO:
                yield name, _STEPS_OF_TWO[name](value)
            elif not _is_link(value):
                yield name, value
            elif not (
                name in optional and self._type_of(value) in ("CLIP_VISION_OUTPUT", "AUDIO_ENCODER_OUTPUT")
            ):
                yield name, self._taken(value, name)

    def _stand_in(self, kind: str, node: Mapping[str, Any], name: str) -> Link | None:
        """Returns the stand-in for an output of this type, or None if the node itself stays."""
        takes = {self._type_of(link) for link in _links(node)}
        if kind == "MODEL" and set(_FILE_INPUTS) & set(node["inputs"]):
            loader = ("CheckpointLoaderSimple", {"ckpt_name": self._file})
            if self._kind not in CHECKPOINTS:
                loader = ("UNETLoader", {"unet_name": self._file, "weight_dtype": "default"})
            return [self._once(loader[0], **loader[1]), 0]
        if kind == "CONDITIONING" and "CLIP" in takes:
            return self._text(node)
        if kind == "VAE":
            vae = _VAES.get(self._kind)
            return [self._once(vae) if vae else self._once("TestWanVAE", channels=3), 0]
        if kind == "IMAGE":
            several = _SEVERAL if _VIDEOS.search(name) else 1
            return [self._once("TestImage", width=_SIDE, height=_SIDE, batch=several, channels=3), 0]
        if kind == "MASK":
            return [self._once("SolidMask", value=1.0, width=_SIDE, height=_SIDE), 0]
        encodes = "VAE" in takes and "CONDITIONING" not in takes
        if kind == "LATENT" and (encodes or node["class_type"].startswith("Empty")):
            return self._latent(node)
        return None

    def _text(self, node: Mapping[str, Any]) -> Link:
        sizes = {"tokens": 7, "width": 64, "pooled_width": 32, "batch": 1, **MODELS[self._kind]["text"]}
        draw = sum(map(ord, str(sorted(map(str, node["inputs"].values()))))) % 1000
        found = [self._once("TestConditioning", draw=draw, guidance=3.5, **sizes), 0]
        if "padding" in MODELS[self._kind]:
            found = [self._once("TestTextMask", conditioning=found, padding=MODELS[self._kind]["padding"]), 0]
        return found

    def _latent(self, node: Mapping[str, Any]) -> Link:
        """Returns a random latent if the graph encodes a picture, else an empty one. LTX-2's graphs join both kinds."""
        shape = MODELS[self._kind]["latent"].format(b=1)
        sound = "audio" in node["class_type"].lower()
        if self._kind == "ltx_sound":
            shape = shape.split(";")[sound]
        draw = -1 if node["class_type"].startswith("Empty") or sound else 5
        return [self._once("TestShapedLatent", shape=shape, draw=draw), 0]

    def _once(self, class_type: str, **inputs: Any) -> str:
        """Adds a node unless the same one is there already; returns its id."""
        name = f"{class_type} {sorted(inputs.items(), key=str)}"
        self.prompt[name] = {"class_type": class_type, "inputs": inputs}
        return name

    def _add(self, class_type: str, **inputs: Any) -> str:
        name = f"added {len(self.prompt)}"
        self.prompt[name] = {"class_type": class_type, "inputs": inputs}
        return name

    def _outputs(self, name: str) -> list[str]:
        return self._nodes[self._graph[name]["class_type"]]["output"] or [""]

    def _type_of(self, link: Link) -> str:
        outputs = self._outputs(link[0])
        return outputs[link[1]] if link[1] < len(outputs) else ""


def _is_link(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _links(node: Mapping[str, Any]) -> list[Link]:
    return [value for value in node["inputs"].values() if _is_link(value)]
