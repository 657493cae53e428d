"""Test-only nodes: put made-up conditioning and latents into a graph, and take latents and text out of it.

They replace text encoder and VAE, which cannot be made tiny, so that a test compares samplers and nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import comfy.clip_vision
import comfy.sd
import folder_paths
import torch
from comfy.cli_args import args
from comfy.ldm.flux.redux import ReduxImageEncoder
from comfy.model_patcher import ModelPatcher
from comfy.taesd.taesd import TAESD
from comfy_api.latest import ComfyExtension, io
from safetensors.torch import save_file
from server import PromptServer

CATEGORY = "parallel/testing"


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


class TestLatent(io.ComfyNode):
    """LATENT ``[batch, 16, height, width]`` in latent units (eighths of a pixel), odd sides included."""

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
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width, height, batch, draw, batch_index, noise_mask, channels=16) -> io.NodeOutput:
        shape = (batch, channels, height, width)
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


class TestSaveLatent(io.ComfyNode):
    """Write a LATENT's samples as safetensors (key ``samples``) to a path under the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveLatent",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.String.Input("path", default="latent.safetensors")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, latent, path) -> io.NodeOutput:
        save_file({"samples": latent["samples"].contiguous().cpu()}, output_path(path))
        return io.NodeOutput()


class TestClip(io.ComfyNode):
    """A CLIP of one weight under a name that text encoders' LoRAs go by, for loaders that want one beside a MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestClip", category=CATEGORY, inputs=[], outputs=[io.Clip.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        encoder = torch.nn.Module()
        encoder.__dict__["dtype"] = torch.float32
        path = "clip_l.transformer.text_model.encoder.layers.0.mlp"
        module = encoder
        for name in path.split("."):
            module.add_module(name, torch.nn.Module())
            module = module.get_submodule(name)
        module.add_module("fc1", torch.nn.Linear(8, 8))
        clip = comfy.sd.CLIP(no_init=True)
        clip.cond_stage_model, clip.tokenizer, clip.layer_idx = encoder, None, None
        clip.patcher = ModelPatcher(encoder, torch.device("cpu"), torch.device("cpu"))
        clip.tokenizer_options, clip.use_clip_schedule, clip.apply_hooks_to_conds = {}, False, None
        return io.NodeOutput(clip)


class TestCircularVAE(io.ComfyNode):
    """A VAE whose convolutions wrap round the image, as packs for seamless textures make it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestCircularVAE",
            category=CATEGORY,
            inputs=[io.Vae.Input("vae")],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, vae) -> io.NodeOutput:
        for layer in vae.first_stage_model.modules():
            if isinstance(layer, torch.nn.Conv2d) and layer.kernel_size == (3, 3):
                layer.padding_mode = "circular"
        return io.NodeOutput(vae)


class TestOtherPlatform(io.ComfyNode):
    """Passes a LATENT on; from then on the pack believes that it runs on Windows, or again where it does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestOtherPlatform",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent"), io.Boolean.Input("pretend")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent, pretend) -> io.NodeOutput:
        (name,) = (name for name in sys.modules if name.endswith(".parallel_backend.sidecar.supervisor"))
        sys.modules[name].sys = SimpleNamespace(platform="win32") if pretend else sys
        return io.NodeOutput(latent)


class TestScaledVAE(io.ComfyNode):
    """A VAE with one of its weights doubled, in place."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestScaledVAE",
            category=CATEGORY,
            inputs=[io.Vae.Input("vae")],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, vae) -> io.NodeOutput:
        vae.first_stage_model.decoder.conv_out.weight.mul_(2)
        return io.NodeOutput(vae)


class TestTinyVAE(io.ComfyNode):
    """A random TAESD for 16 channels, as VAELoader makes one of its file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestTinyVAE", category=CATEGORY, inputs=[], outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(0)
        shapes = {name: tensor.shape for name, tensor in TAESD(latent_channels=16).state_dict().items()}
        sd = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return io.NodeOutput(comfy.sd.VAE(sd=sd))


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


def rank_states() -> list[str]:
    """Of the pack's groups of ranks in this process."""
    (pool,) = (m for name, m in list(sys.modules.items()) if name.endswith("parallel_backend.sidecar.pool"))
    return [sidecar.state.value for sidecar in pool.all_sidecars()]


class TestRankStates(io.ComfyNode):
    """The states of the pack's groups of ranks in this process, in words."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestRankStates",
            category=CATEGORY,
            inputs=[io.Int.Input("nonce", min=0, max=2**31, tooltip="another number, another look")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, nonce) -> io.NodeOutput:
        return io.NodeOutput(" ".join(rank_states()))


class TestUnload(io.ComfyNode):
    """Unloads a MODEL as ComfyUI does where another one needs room; the states of ranks before, after an attempt under
    --highvram, and after one without."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUnload",
            category=CATEGORY,
            inputs=[io.Model.Input("model")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        states = rank_states()
        for highvram in (True, False):
            args.highvram = highvram
            model.partially_unload(model.offload_device, 1)
            states += rank_states()
        return io.NodeOutput(" ".join(states))


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


class TestSaveImage(io.ComfyNode):
    """Write an IMAGE ``[batch, height, width, 3]`` unrounded as safetensors (key ``image``)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveImage",
            category=CATEGORY,
            inputs=[io.Image.Input("image"), io.String.Input("path", default="image.safetensors")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, image, path) -> io.NodeOutput:
        save_file({"image": image.contiguous().cpu()}, output_path(path))
        return io.NodeOutput()


class TestSaveText(io.ComfyNode):
    """Write a STRING to a path under the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveText",
            category=CATEGORY,
            inputs=[
                io.String.Input("text", force_input=True),
                io.String.Input("path", default="text.txt"),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, text, path) -> io.NodeOutput:
        output_path(path).write_text(text)
        return io.NodeOutput()


def output_path(path: str) -> Path:
    """``path`` under ComfyUI's output folder, its parents made."""
    target = Path(folder_paths.get_output_directory()) / path
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def fork_ranks(prompt: dict) -> dict:
    """Has the pack's ranks forked from a prepared process from the first prompt on (tests/support/forked_ranks.py)."""
    (name,) = (name for name in sys.modules if name.endswith(".parallel_backend.sidecar.supervisor"))
    supervisor = sys.modules[name]
    if supervisor.subprocess is subprocess:
        path = supervisor.PACK_ROOT / "tests" / "support" / "forked_ranks.py"
        spec = importlib.util.spec_from_file_location("forked_ranks", path)
        sys.modules["forked_ranks"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        supervisor.subprocess = module.ForkedSubprocess(supervisor)
    return prompt


class InjectExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            TestAnything,
            TestCircularVAE,
            TestClip,
            TestConditioning,
            TestLatent,
            TestOtherPlatform,
            TestSaveImage,
            TestSaveLatent,
            TestSaveText,
            TestScaledVAE,
            TestStyle,
            TestTinyVAE,
            TestAttentionMask,
            TestRankStates,
            TestUnload,
        ]


async def comfy_entrypoint() -> InjectExtension:
    if "PARALLEL_TEST_FORKED_RANKS" in os.environ:
        PromptServer.instance.add_on_prompt_handler(fork_ranks)
    return InjectExtension()
