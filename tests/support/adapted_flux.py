"""A tiny Flux.1 file loaded as diffusers' module behind the adapter and as ComfyUI's own module, and calls of both."""

from __future__ import annotations

import torch

from parallel_backend.models.comfyui.tiny.weights import random
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec

SIZES = dict(heads=4, double_blocks=1, single_blocks=2, context_dim=48, pooled_dim=32)
WIDTH = 4 * 128


def adapted(path, part=None):
    """Returns the loaded model of a tiny Flux file."""
    return load(ModelSpec(str(path)), torch.device("cpu"), part)


def comfyui_flux(path):
    """Returns ComfyUI's module as its own loader makes it of a file. ComfyUI must be imported before."""
    from comfy.sd import load_diffusion_model

    return load_diffusion_model(str(path)).model.diffusion_model.eval().requires_grad_(False)


def call(batch, height, width, text=11, guided=True):
    """Returns (args, kwargs) of a call. `text`: number of text tokens."""
    kwargs = {"context": random(batch, text, SIZES["context_dim"]), "y": random(batch, 32)}
    if guided:
        kwargs["guidance"] = torch.full((batch,), 3.5)
    return (random(batch, 16, height, width), torch.linspace(0.9, 0.5, batch)), kwargs


CALLS = {
    "plain": lambda: call(1, 8, 8),
    "odd sides": lambda: call(2, 9, 7),
    "three texts of one token": lambda: call(3, 6, 10, text=1),
    "single tokens": lambda: call(1, 2, 2, text=1),
    "many tokens": lambda: call(1, 16, 16),
    "no guidance": lambda: call(1, 8, 8, guided=False),
}
