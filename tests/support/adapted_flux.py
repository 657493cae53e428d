"""A tiny Flux.1 file loaded as diffusers' module behind the adapter and as ComfyUI's own module, and calls of both."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from parallel_backend.models.comfyui.tiny.cases import build_tiny
from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux

SIZES = dict(heads=4, double_blocks=1, single_blocks=2, context_dim=48, pooled_dim=32)
WIDTH = 4 * 128


def adapted(path, part=None, written=False, sizes=SIZES):
    """Returns the loaded model of a tiny Flux file. `written`: True if the file exists already."""
    path = path if written else write_tiny_flux(path, **sizes)
    return load(ModelSpec(str(path)), torch.device("cpu"), part)


def comfyui_flux(path, sizes=SIZES):
    """Returns ComfyUI's module with the file's weights. ComfyUI must be imported before."""
    module = build_tiny(
        "flux",
        vec_in_dim=SIZES["pooled_dim"],
        context_in_dim=SIZES["context_dim"],
        hidden_size=sizes["heads"] * 128,
        num_heads=sizes["heads"],
        depth=SIZES["double_blocks"],
        depth_single_blocks=SIZES["single_blocks"],
        axes_dim=[16, 56, 56],
    )
    own = module.state_dict()
    tensors = {  # ComfyUI has renamed the scales of norms
        name if name in own else name.replace(".scale", ".weight"): tensor
        for name, tensor in load_file(path).items()
    }
    module.load_state_dict(tensors, strict=True)
    return module.eval().requires_grad_(False)


def call(batch, height, width, text=11):
    """Returns (args, kwargs) of a call. `text`: number of text tokens."""
    kwargs = {
        "context": random(batch, text, SIZES["context_dim"]),
        "y": random(batch, 32),
        "guidance": torch.full((batch,), 3.5),
    }
    return (random(batch, 16, height, width), torch.linspace(0.9, 0.5, batch)), kwargs


def _without_guidance():
    args, kwargs = call(1, 8, 8)
    del kwargs["guidance"]
    return args, kwargs


CALLS = {
    "plain": lambda: call(1, 8, 8),
    "odd sides": lambda: call(2, 9, 7),
    "three texts of one token": lambda: call(3, 6, 10, text=1),
    "single tokens": lambda: call(1, 2, 2, text=1),
    "many tokens": lambda: call(1, 16, 16),
    "no guidance": _without_guidance,
}
