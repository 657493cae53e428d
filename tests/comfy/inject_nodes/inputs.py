"""Made-up inputs: conditioning, latents, masks, styles, values of any type."""

from __future__ import annotations

import json

import comfy.clip_vision
import comfy.sd
import torch
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy_api.latest import io

from .category import CATEGORY


class TestConditioning(io.ComfyNode):
    """CONDITIONING drawn from a seed: context ``[batch, tokens, width]`` and pooled ``[batch, pooled_width]``."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestConditioning",
            category=CATEGORY,
            inputs=[
                io.Int.Input("draw", default=0, min=0),
                io.Int.Input("tokens", default=7, min=1),
                io.Int.Input("width", default=64, min=1),
                io.Int.Input("pooled_width", default=32, min=1),
                io.Int.Input("batch", default=1, min=1),
                io.Float.Input("guidance", default=-1.0, min=-1.0, max=100.0, tooltip="-1 leaves it out"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, draw, tokens, width, pooled_width, batch, guidance) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(draw)
        context = torch.randn(batch, tokens, width, generator=generator)
        extras = {"pooled_output": torch.randn(batch, pooled_width, generator=generator)}
        if guidance >= 0:
            extras["guidance"] = guidance
        return io.NodeOutput([[context, extras]])


class TestImage(io.ComfyNode):
    """IMAGE ``[batch, height, width, channels]`` of noise, sides in pixels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        sizes = [io.Int.Input(name, min=1) for name in ("width", "height", "batch", "channels")]
        return io.Schema(node_id="TestImage", category=CATEGORY, inputs=sizes, outputs=[io.Image.Output()])

    @classmethod
    def execute(cls, width, height, batch, channels) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(width)
        return io.NodeOutput(torch.rand(batch, height, width, channels, generator=generator))


class TestLatent(io.ComfyNode):
    """LATENT ``[batch, 16, height, width]`` in latent units (eighths of a pixel), odd sides included; with frames
    ``[batch, 16, frames, height, width]``."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestLatent",
            category=CATEGORY,
            inputs=[
                io.Int.Input("width", default=16, min=1),
                io.Int.Input("height", default=16, min=1),
                io.Int.Input("batch", default=1, min=1),
                io.Int.Input("draw", default=-1, min=-1, tooltip="-1 gives zeros, an empty latent"),
                io.String.Input("batch_index", default="", tooltip="for instance 0,3,1; empty leaves it out"),
                io.Boolean.Input(
                    "noise_mask", default=False, tooltip="left half 0, right half 1, soft between"
                ),
                io.Int.Input("channels", default=16, min=1, optional=True),
                io.Int.Input("frames", default=0, min=0, optional=True, tooltip="0: a latent of images"),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls, width, height, batch, draw, batch_index, noise_mask, channels=16, frames=0
    ) -> io.NodeOutput:
        shape = (batch, channels, *((frames,) if frames else ()), height, width)
        if draw < 0:
            latent = {"samples": torch.zeros(shape)}
        else:
            latent = {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(draw))}
        if batch_index:
            latent["batch_index"] = [int(index) for index in batch_index.split(",")]
        if noise_mask:
            ramp = torch.linspace(-1, 2, width * 8).clamp(0, 1)
            latent["noise_mask"] = ramp.expand(1, height * 8, width * 8).clone()
        return io.NodeOutput(latent)


class TestNew(io.ComfyNode):
    """Passes a LATENT on as another object in each prompt, as nodes do whose outputs ComfyUI may not keep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestNew",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        return float("nan")

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        return io.NodeOutput({**latent})


class TestAttentionMask(io.ComfyNode):
    """A mask as StyleModelApply leaves it: an image's left half does not see the last words of the prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestAttentionMask",
            category=CATEGORY,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Int.Input("rows", default=6),
                io.Int.Input("columns", default=8),
                io.Boolean.Input("boolean", default=False),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, rows, columns, boolean) -> io.NodeOutput:
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
        extra = {**extra, "attention_mask": mask, "attention_mask_img_shape": (rows, columns)}
        return io.NodeOutput([[context, extra]])


class TestStyle(io.ComfyNode):
    """A random Redux for prompts of 64 channels, and an image as CLIP Vision sees it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.StyleModel.Output(), io.ClipVisionOutput.Output()]
        return io.Schema(node_id="TestStyle", category=CATEGORY, inputs=[], outputs=outputs)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(0)
        redux = ReduxImageEncoder(redux_dim=8, txt_in_features=64, dtype=torch.float32).requires_grad_(False)
        for parameter in redux.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        seen = comfy.clip_vision.Output()
        seen.last_hidden_state = torch.randn(1, 5, 8, generator=generator)
        return io.NodeOutput(comfy.sd.StyleModel(redux), seen)


class TestAnything(io.ComfyNode):
    """A value of any type, from JSON, over a link that fits everywhere."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestAnything",
            category=CATEGORY,
            inputs=[io.String.Input("value")],
            outputs=[io.AnyType.Output()],
        )

    @classmethod
    def execute(cls, value) -> io.NodeOutput:
        return io.NodeOutput(json.loads(value))
