"""Tiny weight files of ComfyUI's Flux, plain and in every format to which ComfyUI quantises, and inputs for it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui.model import ComfyUIModel
from parallel_backend.models.comfyui.tiny.cases import build_tiny
from parallel_backend.models.comfyui.tiny.weights import fill, random
from parallel_backend.requests import ModelSpec

CPU = torch.device("cpu")
HIDDEN, CONTEXT, POOLED = 256, 256, 128  # multiples of the sizes that quantised kernels need (convrot: 256)
# By the tests' name of a format: (its name in ComfyUI, options of the quantisation).
FORMATS = {
    "float8_e4m3fn": ("float8_e4m3fn", {"scale": "recalculate"}),
    "float8_e5m2": ("float8_e5m2", {"scale": "recalculate"}),
    "int8": ("int8_tensorwise", {"scale": "recalculate"}),
    "int8 convrot": (
        "int8_tensorwise",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 256},
    ),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {"scale": "recalculate"}),
    "convrot w4a4": ("convrot_w4a4", {}),
}
OLD = "float8_e4m3fn, old names"  # format before ComfyUI 0.4: one scale per layer, and one mark for the whole file
_PLAIN = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


def spec(path: Path | str, **options) -> ModelSpec:
    return ModelSpec(str(path), family="comfyui", comfyui=import_comfyui_here(), **options)


def write(
    path: Path, form: str, blocks: int = 2, hidden: int = HIDDEN, tensors: dict[str, Tensor] | None = None
) -> Path:
    """Writes a file. `form`: one of FORMATS, OLD, or one of _PLAIN; `blocks`: of each of two kinds;
    `tensors`: of a Flux; default: random ones."""
    import_comfyui_here()
    tensors = {
        name: p.to(_PLAIN.get(form, torch.bfloat16))
        for name, p in (tensors or random_tensors(blocks, hidden)).items()
    }
    kind, options = FORMATS["float8_e4m3fn" if form == OLD else form] if form not in _PLAIN else ("", {})
    for name in [name for name in tensors if kind and "_blocks." in name and tensors[name].ndim == 2]:
        tensors |= _quantised(name, tensors.pop(name), kind, options)
    if form == OLD:
        renamed = {name.replace(".weight_scale", ".scale_weight"): found for name, found in tensors.items()}
        tensors = {name: found for name, found in renamed.items() if not name.endswith("comfy_quant")}
        tensors["scaled_fp8"] = torch.empty(0, dtype=torch.float8_e4m3fn)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def random_tensors(blocks: int, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """Returns the tensors of a Flux with this number of blocks of each kind."""
    import_comfyui_here()
    sizes = {"hidden_size": hidden, "num_heads": hidden // 128, "axes_dim": [16, 56, 56]}
    sizes |= {"vec_in_dim": POOLED, "context_in_dim": CONTEXT, "depth": blocks, "depth_single_blocks": blocks}
    return dict(fill(build_tiny("flux", **sizes)).state_dict())


def _quantised(name: str, weight: Tensor, kind: str, options: dict) -> dict[str, Tensor]:
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    layout = QUANT_ALGOS[kind]["comfy_tensor_layout"]
    tensors = QuantizedTensor.from_float(weight, layout, **options).state_dict(name)
    notes = {key: value for key, value in options.items() if key.startswith("convrot")}
    about = json.dumps({"format": kind, **notes}).encode()
    return {**tensors, name.removesuffix("weight") + "comfy_quant": torch.tensor(list(about)).to(torch.uint8)}


def inputs(rows: int = 2, height: int = 10, width: int = 6) -> tuple[tuple, dict]:
    """Returns (args, kwargs) of a call of the model."""
    args = (random(rows, 16, height, width), torch.linspace(0.9, 0.5, rows))
    prompt = {"context": random(rows, 7, CONTEXT), "y": random(rows, POOLED)}
    return args, {**prompt, "guidance": torch.full((rows,), 3.5), "transformer_options": {}}


def answer(model: ComfyUIModel) -> Tensor:
    """Returns the answer to a call with `inputs()`; collective if ranks share out the weights."""
    args, kwargs = inputs()
    sharding = model.byte_sharding
    with torch.inference_mode(), nullcontext() if sharding is None else sharding.call():
        return model.module(*args, **kwargs)
