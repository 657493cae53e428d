"""Nodes for ComfyUI's own model patches: tiny patch networks, as ModelPatchLoader makes them, and their inputs."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_extras import nodes_model_patch

from .coders import drawn
from .node import node

_MADE = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
KINDS = {
    "uso": lambda: nodes_model_patch.SigLIPMultiFeatProjModel(
        siglip_token_nums=9, style_token_nums=4, siglip_token_dims=12, hidden_size=256, **_MADE
    ),
    "infinite talk": lambda: nodes_model_patch.MultiTalkModelPatch(
        context_tokens=4, in_dim=640, intermediate_dim=32, out_dim=24, num_layers=2, operations=comfy.ops.manual_cast
    ),
}  # fmt: skip


@node("TestModelPatch")
def model_patch(kind: str) -> io.ModelPatch:
    """Returns a MODEL_PATCH with random weights."""
    network = KINDS[kind]()
    network.load_state_dict(drawn(network.state_dict(), 7, "norm"))
    return ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))


@node("TestSeenImage")
def seen_image() -> io.ClipVisionOutput:
    """Returns a random CLIP_VISION_OUTPUT: an image encoder's hidden states of each layer."""
    layers = torch.randn(1, 24, 9, 12, generator=torch.Generator().manual_seed(5))
    return SimpleNamespace(all_hidden_states=layers, penultimate_hidden_states=layers[:, -2])


@node("TestHeardSound")
def heard_sound(draw: int) -> io.AudioEncoderOutput:
    """Returns a random AUDIO_ENCODER_OUTPUT: a sound encoder's hidden states of each layer."""
    generator = torch.Generator().manual_seed(draw)
    return {"encoded_audio_all_layers": [torch.randn(1, 30, 768, generator=generator) for _ in range(13)]}


@node("TestSplatModel")
def splat_model(model: io.Model) -> tuple[io.Model, io.Vae]:
    """Returns a MODEL and a VAE with the attributes that TripoSplat's preview reads before sampling; no decoder."""
    model.model.diffusion_model.q_token_length = 4
    stage = SimpleNamespace(gaussians_per_point=1, gs=SimpleNamespace(model_channels=8))
    return [model, SimpleNamespace(first_stage_model=stage, vae_dtype=torch.float32, patcher=None)]


@node("TestNewAttribute")
def new_attribute(model: io.Model, factor: float) -> io.Model:
    """Returns a MODEL whose network has another class, which scales its output by an attribute that it had not."""

    class Scaled(type(model.model.diffusion_model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * self.test_factor

    model = model.clone()
    model.add_object_patch("diffusion_model.test_factor", factor)
    model.add_object_patch("diffusion_model.__class__", Scaled)
    return model
