"""A VAE of LTX-Video's kind, whose decode draws noise, and one that makes no pictures."""

from __future__ import annotations

import json

import comfy.sd
import torch
from comfy.ldm.hunyuan3d.vae import ShapeVAE
from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE
from comfy_api.latest import io

from .category import CATEGORY

_BLOCKS = [
    ["res_x", {"num_layers": 1}],
    ["compress_all", {"residual": True, "multiplier": 2}],
    ["compress_space", {"multiplier": 2}],
    ["res_x", {"num_layers": 1}],
]
_CONFIG = {
    "dims": 3,
    "latent_channels": 128,
    "norm_layer": "pixel_norm",
    "patch_size": 4,
    "encoder_blocks": [["res_x", {"num_layers": 1}]],
    "decoder_blocks": _BLOCKS,
    "encoder_base_channels": 8,
    "decoder_base_channels": 4,
    "latent_log_var": "uniform",
    "timestep_conditioning": True,
    "decode_noise_scale": 0.5,
}


class TestLtxVAE(io.ComfyNode):
    """Random and narrow, as VAELoader makes one of its file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestLtxVAE", category=CATEGORY, inputs=[], outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(1)
        sd = VideoVAE(config=_CONFIG).state_dict()
        for name, tensor in sd.items():
            drawn = torch.randn(tensor.shape, generator=generator)
            sd[name] = drawn * max(1, tensor[:1].numel()) ** -0.5 if tensor.ndim > 1 else 1 + 0.2 * drawn
        return io.NodeOutput(comfy.sd.VAE(sd=sd, metadata={"config": json.dumps({"vae": _CONFIG})}))


class TestShapeVAE(io.ComfyNode):
    """A VAE with nothing of Hunyuan3D's but its class."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestShapeVAE", category=CATEGORY, inputs=[], outputs=[io.Vae.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        vae = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
        vae.first_stage_model.__class__ = ShapeVAE
        return io.NodeOutput(vae)


class TestSeed(io.ComfyNode):
    """Sets what the decode behind it draws its noise by."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Latent.Input("latent"), io.Int.Input("number")]
        return io.Schema(
            node_id="TestSeed",
            category=CATEGORY,
            inputs=inputs,
            outputs=[io.Latent.Output()],
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        return float("nan")

    @classmethod
    def execute(cls, latent: dict, number: int) -> io.NodeOutput:
        torch.manual_seed(number)
        return io.NodeOutput(latent)
