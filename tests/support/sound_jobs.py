"""Jobs for ComfyUI's sampling loop on tiny models of video and sound. Their latent has both in one flat tensor."""

from __future__ import annotations

import json
from dataclasses import replace

from safetensors.torch import save_file
from torch import Size, nn

from comfy_modules import import_comfyui_here
from comfy_weight_files import spec
from parallel_backend.models.comfyui.tiny.cases import build_tiny, config_of
from parallel_backend.models.comfyui.tiny.weights import fill, random
from shipped_jobs import LoopJob
from wan_jobs import wan_job

SHAPES = {  # (shape of one row of video, of sound)
    "ltx-2": (Size((16, 3, 8, 6)), Size((8, 7, 16))),
    "minimax h3": (Size((24, 2, 8, 6)), Size((32, 2, 5))),
}
_WIDTHS = {"ltx-2": 96, "minimax h3": 48}  # width of a text token


def sound_model(folder, name: str):
    """Writes a tiny model to a file and returns its ModelSpec."""
    import_comfyui_here()
    model = {"ltx-2": "ltx-2", "minimax h3": "minimax"}[name]
    config = json.dumps({"transformer": config_of(model)}) if name == "ltx-2" else "{}"
    return spec(_written(folder / f"{name}.safetensors", fill(build_tiny(model)), config))


def _written(path, module: nn.Module, config: str):
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, path, metadata={"config": config})
    return path


def sound_job(name: str, sampler: str = "euler") -> LoopJob:
    """Returns a job with two prompts of different lengths, for the sampling of the file's model."""
    shapes = [(1, *shape) for shape in SHAPES[name]]
    noise = random(1, 1, sum(shape.numel() for shape in SHAPES[name]), seed=1)
    beside = {"latent_shapes": ("CONDConstant", shapes)}
    if name == "minimax h3":
        beside["minimax_payload"] = ("CONDConstant", {"seed": 3})
    else:
        beside["frame_rate"] = ("CONDConstant", 25)
    conds = {
        side: [
            {
                "model_conds": {
                    "c_crossattn": ("CONDRegular", random(1, words, _WIDTHS[name], seed=5)),
                    **beside,
                }
            }
        ]
        for side, words in (("positive", 7), ("negative", 4))
    }
    latent = noise.new_zeros(noise.shape)
    return replace(wan_job(sampler), noise=noise, latent=latent, conds=conds)
