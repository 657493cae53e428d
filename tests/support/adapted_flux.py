"""A tiny Flux.1 file loaded as diffusers' module behind the adapter and as ComfyUI's own module, and calls of both."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from parallel_backend.models.comfyui.tiny.cases import build_tiny
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux

SIZES = dict(heads=4, double_blocks=2, single_blocks=2, context_dim=48, pooled_dim=32)
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


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def call(batch, height, width, text=11, references=(), method=None, control=False, mask=False):
    """Returns (args, kwargs) of a call. `text`: number of text tokens; `references`: their latent (height, width)."""
    context = _random(batch, text, SIZES["context_dim"])
    kwargs = {"context": context, "y": _random(batch, 32), "guidance": torch.full((batch,), 3.5)}
    if references:
        kwargs["ref_latents"] = [_random(batch, 16, *size, seed=n) for n, size in enumerate(references)]
        kwargs |= {} if method is None else {"ref_latents_method": method}
    tokens = -(-height // 2) * -(-width // 2)
    if control:
        kwargs["control"] = {
            "input": [_random(batch, tokens, WIDTH, seed=5)],
            "output": [None, _random(batch, tokens, WIDTH, seed=6)],
        }
    if mask:
        total = text + tokens + sum(-(-h // 2) * -(-w // 2) for h, w in references)
        kwargs["attention_mask"] = _random(batch, total, total, seed=7)
    return (_random(batch, 16, height, width), torch.linspace(0.9, 0.5, batch)), kwargs


CALLS = {
    "plain": lambda: call(1, 8, 8),
    "odd sides": lambda: call(2, 9, 7),
    "three texts of one token": lambda: call(3, 6, 10, text=1),
    "single tokens": lambda: call(1, 2, 2, text=1),
    "many tokens": lambda: call(1, 16, 16),
    "no guidance": lambda: _without(call(1, 8, 8), "guidance"),
    "no pooled text": lambda: _without(call(2, 8, 8), "y"),
    "a reference": lambda: call(2, 9, 7, references=[(6, 10)]),
    "references side by side": lambda: call(1, 8, 8, references=[(6, 10), (10, 5), (4, 4)]),
    "references by index": lambda: call(1, 9, 7, references=[(6, 10), (10, 5)], method="index"),
    "references behind": lambda: call(1, 9, 7, references=[(6, 10), (9, 5)], method="uxo"),
    "a controlnet": lambda: call(2, 9, 7, control=True),
    "a mask": lambda: call(2, 9, 7, mask=True),
    "everything": lambda: call(2, 9, 7, references=[(6, 10)], control=True, mask=True),
}


def _without(made, name):
    made[1].pop(name)
    return made
