"""The way a MODEL was loaded, as ComfyUI's core loaders note it. Ranks need it to load the same model."""

from __future__ import annotations

from pathlib import Path

import comfy.model_patcher
import comfy.sd

from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.gguf_file import is_gguf
from ...parallel_backend.requests import ComfyUISource, ModelSpec
from ..host.comfyui_flags import comfyui_root, numeric_flags
from .files import is_safetensors

_LOADERS = "Load Diffusion Model or Load Checkpoint, or (also .gguf files) Parallel Model Loader"


def spec_of(patcher: comfy.model_patcher.ModelPatcher) -> ModelSpec:
    """Returns a MODEL's file and how it was read. Raises RequestError if its loader is unknown or did not note it."""
    noted = getattr(patcher, "cached_patcher_init", None)
    if noted is None:
        raise RequestError(
            f"This MODEL does not say which file it was loaded from, so the devices cannot load it too: its loader is "
            f"none of ComfyUI's own, or this ComfyUI is too old to note it. Load the file with {_LOADERS}."
        )
    load, arguments = noted[:2]
    if load is comfy.sd.load_diffusion_model:
        path, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
        return make_spec(path, "diffusion_model", options)
    if load is comfy.sd.load_checkpoint_guess_config and noted[2:] == (0,):
        return make_spec(arguments[0], "checkpoint", arguments[6] if len(arguments) > 6 else {})
    name = f"{getattr(load, '__module__', '?')}.{getattr(load, '__qualname__', load)}"
    raise RequestError(
        f"This MODEL was loaded by {name}, which the devices do not know. Load the file with {_LOADERS}."
    )


def make_spec(path: str, part: str, options: dict) -> ModelSpec:
    """Returns the spec of a file that ComfyUI loads as `part` (ComfyUISource) with these model_options. Raises
    RequestError for formats and options that the devices do not support."""
    if not (is_safetensors(path) or is_gguf(path)):
        raise RequestError(
            f"{Path(path).name} is no .safetensors or .gguf file, and the devices read no other: a .ckpt or .pt can "
            f"run code. Save it as .safetensors (ModelSave or CheckpointSave), or use another file."
        )
    if is_gguf(path) and options:
        raise RequestError(
            f"{Path(path).name} has formats of its own (GGUF); set weight_dtype to default or auto, or choose a "
            f".safetensors file."
        )
    if options.get("custom_operations") is not None:
        raise RequestError(
            f"{Path(path).name} was loaded with layers of another node pack (such as NF4), which the devices do not "
            f"have. Load the file with {_LOADERS}."
        )
    dtype = options.get("dtype", options.get("weight_dtype"))
    return ModelSpec(
        path=str(path),
        family="comfyui",
        weight_dtype="auto" if dtype is None else str(dtype).removeprefix("torch."),
        comfyui=ComfyUISource(
            root=comfyui_root(),
            flags=numeric_flags(),
            part=part,
            fp8_matmul=bool(options.get("fp8_optimizations", False)),
        ),
    )
