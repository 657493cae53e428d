"""Jobs for ComfyUI's sampling loop on tiny models of video and sound. Their latent has both in one flat tensor."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_model
from torch import Size

from comfy_modules import import_comfyui_here
from comfy_weight_files import spec
from parallel_backend.models.comfyui.tiny.cases import build_tiny, config_of
from parallel_backend.models.comfyui.tiny.weights import fill, random
from shipped_jobs import LoopJob
from wan_jobs import two_prompts, wan_job

SHAPES = {  # (shape of one row of video, of sound)
    "ltx-2": (Size((16, 3, 8, 6)), Size((8, 7, 16))),
    "minimax h3": (Size((24, 2, 8, 6)), Size((32, 2, 5))),
}


def sound_model(folder, name: str):
    """Writes a tiny model to a file and returns its ModelSpec."""
    import_comfyui_here()
    path, model = folder / f"{name}.safetensors", name.removesuffix(" h3")
    config = json.dumps({"transformer": config_of(model)}) if name == "ltx-2" else "{}"
    save_model(fill(build_tiny(model)), path, metadata={"config": config})
    return spec(path)


def sound_job(name: str, sampler: str = "euler") -> LoopJob:
    """Returns a job with two prompts of different lengths, for the sampling of the file's model."""
    shapes = [(1, *shape) for shape in SHAPES[name]]
    noise = random(1, 1, sum(shape.numel() for shape in SHAPES[name]), seed=1)
    beside = {"latent_shapes": ("CONDConstant", shapes)}
    if name == "minimax h3":
        conds = two_prompts(48, beside | {"minimax_payload": ("CONDConstant", {"seed": 3})})
    else:
        conds = two_prompts(96, beside | {"frame_rate": ("CONDConstant", 25)})
    return wan_job(sampler, noise=noise, latent=torch.zeros_like(noise), conds=conds)
