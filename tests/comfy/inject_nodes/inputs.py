"""Nodes that make inputs (conditioning, images, latents, masks, styles, values of any type), and one that samples."""

from __future__ import annotations

import json

import comfy.clip_vision
import comfy.sd
import torch
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy_api.latest import io
from comfy_execution.graph_utils import GraphBuilder

from .node import node


@node(
    "TestConditioning",
    [
        io.Int.Input("draw", default=0, min=0),
        io.Int.Input("tokens", default=7, min=1),
        io.Int.Input("width", default=64, min=1),
        io.Int.Input("pooled_width", default=32, min=1),
        io.Int.Input("batch", default=1, min=1),
        io.Float.Input("guidance", default=-1.0, min=-1.0, max=100.0, tooltip="-1 leaves it out"),
    ],
    [io.Conditioning.Output()],
)
def conditioning(draw, tokens, width, pooled_width, batch, guidance):
    """Returns CONDITIONING of seed `draw`: context ``[batch, tokens, width]`` and pooled ``[batch, pooled_width]``."""
    generator = torch.Generator().manual_seed(draw)
    context = torch.randn(batch, tokens, width, generator=generator)
    extras = {"pooled_output": torch.randn(batch, pooled_width, generator=generator)}
    if guidance >= 0:
        extras["guidance"] = guidance
    return [[context, extras]]


@node(
    "TestImage",
    [io.Int.Input(name, min=1) for name in ("width", "height", "batch", "channels")],
    [io.Image.Output()],
)
def image(width, height, batch, channels):
    """Returns an IMAGE ``[batch, height, width, channels]`` of noise, sides in pixels."""
    return torch.rand(batch, height, width, channels, generator=torch.Generator().manual_seed(width))


@node(
    "TestLatent",
    [
        io.Int.Input("width", default=16, min=1),
        io.Int.Input("height", default=16, min=1),
        io.Int.Input("batch", default=1, min=1),
        io.Int.Input("draw", default=-1, min=-1, tooltip="-1 gives zeros, an empty latent"),
        io.String.Input("batch_index", default="", tooltip="for instance 0,3,1; empty leaves it out"),
        io.Boolean.Input("noise_mask", default=False, tooltip="left half 0, right half 1, soft between"),
        io.Int.Input("channels", default=16, min=1, optional=True),
        io.Int.Input("frames", default=0, min=0, optional=True, tooltip="0: a latent of images"),
    ],
    [io.Latent.Output()],
)
def latent(width, height, batch, draw, batch_index, noise_mask, channels=16, frames=0):
    """Returns a LATENT ``[batch, channels, height, width]``, with frames ``[batch, channels, frames, height, width]``.
    Sides are in latent units (8 pixels) and may be odd."""
    shape = (batch, channels, *((frames,) if frames else ()), height, width)
    if draw < 0:
        found = {"samples": torch.zeros(shape)}
    else:
        found = {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(draw))}
    if batch_index:
        found["batch_index"] = [int(index) for index in batch_index.split(",")]
    if noise_mask:
        ramp = torch.linspace(-1, 2, width * 8).clamp(0, 1)
        found["noise_mask"] = ramp.expand(1, height * 8, width * 8).clone()
    return found


@node(
    "TestAttentionMask",
    [
        io.Conditioning.Input("conditioning"),
        io.Int.Input("rows", default=6),
        io.Int.Input("columns", default=8),
        io.Boolean.Input("boolean", default=False),
    ],
    [io.Conditioning.Output()],
)
def attention_mask(conditioning, rows, columns, boolean):
    """Adds an attention mask, as StyleModelApply does: the image's left half does not see the prompt's last half. The
    mask is `boolean`, or additive with random values."""
    ((context, extra),) = conditioning
    text, size = context.shape[1], context.shape[1] + rows * columns
    left = torch.arange(rows * columns) % columns < columns // 2
    hidden = torch.zeros(1, size, size, dtype=torch.bool)
    hidden[:, text:, text // 2 : text] = left.reshape(1, -1, 1)
    if boolean:
        mask = ~hidden
    else:
        bias = torch.randn(1, size, size, generator=torch.Generator().manual_seed(5))
        mask = bias.masked_fill(hidden, float("-inf"))
    return [[context, {**extra, "attention_mask": mask, "attention_mask_img_shape": (rows, columns)}]]


@node("TestStyle", outputs=[io.StyleModel.Output(), io.ClipVisionOutput.Output()])
def style():
    """Returns a random Redux for prompts of 64 channels, and a random output of CLIP Vision for one image."""
    generator = torch.Generator().manual_seed(0)
    redux = ReduxImageEncoder(redux_dim=8, txt_in_features=64, dtype=torch.float32).requires_grad_(False)
    for parameter in redux.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    seen = comfy.clip_vision.Output()
    seen.last_hidden_state = torch.randn(1, 5, 8, generator=generator)
    return [comfy.sd.StyleModel(redux), seen]


@node("TestAnything", [io.String.Input("value")], [io.AnyType.Output()])
def anything(value):
    """Returns a value of any type, parsed from JSON, over a link that fits every input."""
    return json.loads(value)


@node(
    "TestTwice",
    [
        io.String.Input("sampler", tooltip="KSampler, or ParallelSampler"),
        io.AnyType.Input("model"),
        io.Conditioning.Input("prompt"),
        io.Latent.Input("latent"),
    ],
    [io.Latent.Output()],
    enable_expand=True,
)
def twice(sampler, model, prompt, latent):
    """Samples, then samples the result again: expands to two nodes of the class `sampler`, as packs with loops do."""
    graph = GraphBuilder()
    settings = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 3}
    wired = {"positive": prompt, "negative": prompt, **settings}
    wired["parallel_model" if sampler == "ParallelSampler" else "model"] = model
    for denoise in (1.0, 0.5):
        latent = graph.node(sampler, latent_image=latent, denoise=denoise, **wired).out(0)
    return io.NodeOutput(latent, expand=graph.finalize())
