"""API prompts for models of any family: the same sampling with a stock loader, without and with Parallel Model."""

from __future__ import annotations

from comfy_harness import Comfy
from graphs import Graph, devices_of
from tiny_model_files import CHECKPOINTS, write_tiny

_WAN = {"latent": "{b},16,3,10,6", "text": {"width": 4096}}
_HUNYUAN = {"latent": "{b},16,3,10,6", "text": {"width": 48, "pooled_width": 768}}
_PICTURE, _REFERENCE = "1,16,3,10,6", ["1,16,1,10,6"]
_VIDEO_AND_SOUND = {"control_video": _PICTURE, "audio_embed": "1,25,1024,12"}
# By name of the tiny model: shapes of its latent and text, and what else its prompts need. `extras`: shapes of further
# tensors by name, in a list if the prompt has a list of them.
MODELS = {
    "flux": {"latent": "{b},16,11,9", "text": {"width": 64, "pooled_width": 32}},
    "flux2": {"latent": "{b},128,5,7", "text": {"width": 48, "pooled_width": 4}, "reference": "1,128,4,3"},
    "wan_t2v": _WAN | {"latent": "{b},16,3,9,7"},
    "wan_i2v": _WAN | {"start": _PICTURE},
    "hunyuan_video": _HUNYUAN,
    "sd3": {"latent": "{b},16,11,9", "text": {"width": 48, "pooled_width": 2048}},
    "ltx_video": {"latent": "{b},128,3,5,3", "text": {"width": 48}, "padding": 2},
    "ltx_sound": {"latent": "{b},128,3,5,3;{b},8,7,16", "text": {"width": 48, "tokens": 128}, "padding": 0},
    "wan_ti2v": _WAN | {"latent": "{b},48,3,6,5", "first_frame": True},
    # ComfyUI's own module takes no odd sizes here.
    "wan_vace": _WAN | {"extras": {"vace_frames": ["1,32,3,10,6"], "vace_mask": ["1,64,3,10,6"]}},
    "hunyuan_video_15": {"latent": "{b},32,3,5,3", "text": {"width": 48, "pooled_width": 4}},
    "skyreels_i2v": _HUNYUAN | {"extras": {"concat_latent_image": _PICTURE}},
    "wan_camera": _WAN | {"extras": {"concat_latent_image": _PICTURE, "camera_conditions": "1,24,3,80,48"}},
    "wan_scail": _WAN | {"extras": {"reference_latents": _REFERENCE, "pose_video_latent": "1,16,3,5,3"}},
    "wan_s2v": _WAN | {"extras": {"reference_latents": _REFERENCE, **_VIDEO_AND_SOUND}},
    "lens": {"latent": "{b},128,5,7", "text": {"width": 48, "pooled_width": 4}, "padding": 2},
    "joyimage": {"latent": "{b},16,1,7,9", "text": {"width": 4096}, "reference": "1,16,1,4,6"},
    "hunyuan_3d": {"latent": "{b},64,21", "text": {"width": 48}},
    "wan_causal": _WAN,
    "wan_talk": _WAN,
    "wan_fp8": _WAN | {"latent": "{b},16,3,9,7"},
    "cogvideo": {"latent": "{b},16,3,10,6", "text": {"width": 48}},
    "qwen_image": {"latent": "{b},16,1,7,9", "text": {"width": 3584}, "reference": "1,16,1,4,6"},
    "minimax": {"latent": "{b},24,2,6,4;{b},32,2,5", "text": {"width": 48}, "keyframe": "1,24,1,6,4"},
    "unet": {"latent": "{b},4,8,6", "text": {"width": 768}},
    "sdxl": {"latent": "{b},4,9,6", "text": {"width": 2048, "pooled_width": 1280}},
    "sound": {"latent": "{b},64,21", "text": {"width": 768}},
}


class AnyGraph(Graph):
    """Builds an API prompt that samples one of MODELS, once stock and once parallel."""

    def __init__(self, comfy: Comfy, kind: str, file: str = "") -> None:
        """`file`: the name that write_model() returned, if the file is written already."""
        super().__init__()
        self.kind = kind
        self.uneven = False  # True: prompts of different lengths, so ComfyUI calls the model for each
        self.comfy = comfy
        self.file = file or write_model(comfy, kind)

    def stock(self) -> list:
        if self.kind in CHECKPOINTS:
            return [self.add("CheckpointLoaderSimple", ckpt_name=self.file), 0]
        return [self.add("UNETLoader", unet_name=self.file, weight_dtype="default"), 0]

    def parallel(
        self, model: list, devices: str | None = None, exchange_dtype: str = "same", **choice
    ) -> str:
        """Adds the node Parallel Model behind `model` and returns its id."""
        strategy = self.strategy(devices or devices_of(choice), **choice)
        return self.add("ParallelModel", model=model, strategy=strategy, exchange_dtype=exchange_dtype)

    def text_of(self, draw: int) -> list:
        model = MODELS[self.kind]
        found = self.text(draw, **{"tokens": 7 + draw * self.uneven, **model["text"]})
        if "padding" in model:
            found = [self.add("TestTextMask", conditioning=found, padding=model["padding"]), 0]
        return found

    def prompt_of(self, draw: int) -> list:
        model, found = MODELS[self.kind], self.text_of(draw)
        pictures = {"reference": "ReferenceLatent", "start": "TestVideoStart", "keyframe": "TestKeyframe"}
        for draw, (picture, added) in enumerate(pictures.items(), start=20):
            if picture in model:
                latent = [self.add("TestShapedLatent", shape=model[picture], draw=draw), 0]
                found = [self.add(added, conditioning=found, latent=latent), 0]
        for name, shapes in model.get("extras", {}).items():
            extra = {"name": name, "shape": "".join(shapes), "listed": isinstance(shapes, list)}
            found = [self.add("TestPromptExtra", conditioning=found, **extra), 0]
        return found

    def request(self, batch: int = 1) -> tuple[list, list, list]:
        shape = MODELS[self.kind]["latent"].format(b=batch)
        latent = [self.add("TestShapedLatent", shape=shape, draw=-1), 0]
        if "first_frame" in MODELS[self.kind]:
            latent = [self.add("TestFirstFrameKept", latent=latent), 0]
        return self.prompt_of(1), self.prompt_of(2), latent


def write_model(comfy: Comfy, kind: str) -> str:
    """Writes the tiny model's file if it is missing; returns its name in the stock loader's folder."""
    if kind == "flux":
        return comfy.write_flux("any_flux.safetensors")
    folder = "checkpoints" if kind in CHECKPOINTS else "diffusion_models"
    name = f"any_{kind}.safetensors"
    write_tiny(comfy.models(folder) / name, kind)
    return name
