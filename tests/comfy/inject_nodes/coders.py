"""Tiny text encoders and VAEs, and VAEs that another pack has changed."""

from __future__ import annotations

import comfy.sd
import torch
from comfy.ldm.modules.diffusionmodules import model as layers
from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder
from comfy.ldm.wan.vae import WanVAE
from comfy.model_patcher import ModelPatcher
from comfy.taesd.taesd import TAESD
from comfy_api.latest import io

from .category import CATEGORY


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


class TestWanVAE(io.ComfyNode):
    """A random VAE of Wan 2.1's kind, narrow, as VAELoader makes one of its file. `channels`: of its pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("channels", default=3, min=3, max=4)]
        return io.Schema(node_id="TestWanVAE", category=CATEGORY, inputs=inputs, outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls, channels) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(channels)
        sizes = {"dim": 16, "z_dim": 16, "image_channels": channels, "conv_out_channels": channels}
        sd = WanVAE(**sizes, temperal_downsample=[False, True, True]).state_dict()
        for name, tensor in sd.items():
            drawn = torch.randn(tensor.shape, generator=generator)
            sd[name] = 1 + 0.2 * drawn if "gamma" in name else drawn * tensor[0].numel() ** -0.5
        return io.NodeOutput(comfy.sd.VAE(sd=sd))


class TestImageVAE(io.ComfyNode):
    """A random VAE of Flux.1's kind, as VAELoader makes one of its file, whose encoder is as wide as all of them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestImageVAE", category=CATEGORY, inputs=[], outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(0)
        sizes = dict(z_channels=16, resolution=256, in_channels=3, out_ch=3, num_res_blocks=2)
        sizes |= dict(double_z=True, ch_mult=[1, 2, 4, 4], attn_resolutions=[])
        shapes = Decoder(ch=32, **sizes).state_dict(prefix="decoder.")
        sd = {name: torch.zeros(tensor.shape) for name, tensor in shapes.items()}
        for name, tensor in Encoder(ch=128, **sizes).state_dict(prefix="encoder.").items():
            drawn = torch.randn(tensor.shape, generator=generator)
            sd[name] = 1 + 0.2 * drawn if "norm" in name else drawn * tensor[0].numel() ** -0.5
        return io.NodeOutput(comfy.sd.VAE(sd=sd))


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


def _other_swish(x):
    return torch.nn.functional.gelu(x)


class TestOtherSwish(io.ComfyNode):
    """Replaces a function that ComfyUI's VAEs compute with, or puts it back, as packs that speed them up do."""

    stock = staticmethod(layers.nonlinearity)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestOtherSwish",
            category=CATEGORY,
            inputs=[io.Vae.Input("vae"), io.Boolean.Input("replaced")],
            outputs=[io.Vae.Output()],
        )

    @classmethod
    def execute(cls, vae, replaced) -> io.NodeOutput:
        layers.nonlinearity = _other_swish if replaced else cls.stock
        return io.NodeOutput(vae)


class TestScaledVAE(io.ComfyNode):
    """A VAE with one of its weights halved, in place.

    Doubled, what is clamped to pixels of at most 1 is 2.8, and its rounding grows along: with oneDNN's AVX2
    convolutions ComfyUI on one thread and on two then differ by 1.2e-5.
    """

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
        vae.first_stage_model.decoder.conv_out.weight.mul_(0.5)
        return io.NodeOutput(vae)
