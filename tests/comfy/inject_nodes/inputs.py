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


@node("TestConditioning")
def conditioning(
    draw: int, tokens: int, width: int, pooled_width: int, batch: int, guidance: float
) -> io.Conditioning:
    """Returns CONDITIONING of seed `draw`: context ``[batch, tokens, width]`` and pooled ``[batch, pooled_width]``; a
    negative guidance leaves it out."""
    generator = torch.Generator().manual_seed(draw)
    context = torch.randn(batch, tokens, width, generator=generator)
    extras = {"pooled_output": torch.randn(batch, pooled_width, generator=generator)}
    if guidance >= 0:
        extras["guidance"] = guidance
    return [[context, extras]]


@node("TestImage")
def image(width: int, height: int, batch: int, channels: int) -> io.Image:
    """Returns an IMAGE ``[batch, height, width, channels]`` of noise, sides in pixels."""
    return torch.rand(batch, height, width, channels, generator=torch.Generator().manual_seed(width))


@node("TestLatent")
def latent(
    width: int,
    height: int,
    batch: int,
    draw: int,
    batch_index: str,
    noise_mask: bool,
    channels: int = 16,
    frames: int = 0,
) -> io.Latent:
    """Returns a LATENT ``[batch, channels, height, width]``, with frames ``[batch, channels, frames, height, width]``.
    Sides are in latent units (8 pixels) and may be odd. A negative `draw` gives zeros; `batch_index`: such as 0,3,1, or
    empty; `noise_mask`: its left half is 0, its right half 1."""
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


@node("TestAttentionMask")
def attention_mask(conditioning: io.Conditioning, rows: int, columns: int, boolean: bool) -> io.Conditioning:
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


@node("TestStyle")
def style() -> tuple[io.StyleModel, io.ClipVisionOutput]:
    """Returns a random Redux for prompts of 64 channels, and a random output of CLIP Vision for one image."""
    generator = torch.Generator().manual_seed(0)
    redux = ReduxImageEncoder(redux_dim=8, txt_in_features=64, dtype=torch.float32).requires_grad_(False)
    for parameter in redux.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    seen = comfy.clip_vision.Output()
    seen.last_hidden_state = torch.randn(1, 5, 8, generator=generator)
    return [comfy.sd.StyleModel(redux), seen]


@node("TestAnything")
def anything(value: str) -> io.AnyType:
    """Returns a value of any type, parsed from JSON, over a link that fits every input."""
    return json.loads(value)


@node("TestTwice", enable_expand=True)
def twice(sampler: str, model: io.AnyType, prompt: io.Conditioning, latent: io.Latent) -> io.Latent:
    """Samples, then samples the result again: expands to two nodes of the class `sampler`, as packs with loops do."""
    graph = GraphBuilder()
    settings = {"steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "seed": 3}
    wired = {"positive": prompt, "negative": prompt, **settings}
    wired["parallel_model" if sampler == "ParallelSampler" else "model"] = model
    for denoise in (1.0, 0.5):
        latent = graph.node(sampler, latent_image=latent, denoise=denoise, **wired).out(0)
    return io.NodeOutput(latent, expand=graph.finalize())
