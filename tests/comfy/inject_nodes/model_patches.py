"""Tiny networks of ComfyUI's own patches of models, as ModelPatchLoader makes them of a file, and what feeds them."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_extras import nodes_model_patch

from .category import CATEGORY
from .tiny_models import drawn

_MADE = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}
KINDS = {
    "uso": lambda: nodes_model_patch.SigLIPMultiFeatProjModel(
        siglip_token_nums=9, style_token_nums=4, siglip_token_dims=12, hidden_size=256, **_MADE
    ),
    "infinite talk": lambda: nodes_model_patch.MultiTalkModelPatch(
        context_tokens=4, in_dim=640, intermediate_dim=32, out_dim=24, num_layers=2, operations=comfy.ops.manual_cast
    ),
}  # fmt: skip


class TestModelPatch(io.ComfyNode):
    """A MODEL_PATCH with random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestModelPatch",
            category=CATEGORY,
            inputs=[io.Combo.Input("kind", options=list(KINDS))],
            outputs=[io.ModelPatch.Output()],
        )

    @classmethod
    def execute(cls, kind) -> io.NodeOutput:
        network = KINDS[kind]()
        network.load_state_dict(drawn(network))
        return io.NodeOutput(ModelPatcher(network, torch.device("cpu"), torch.device("cpu")))


class TestSeenImage(io.ComfyNode):
    """What an encoder of images sees in one, layer by layer: CLIP_VISION_OUTPUT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.ClipVisionOutput.Output()]
        return io.Schema(node_id="TestSeenImage", category=CATEGORY, inputs=[], outputs=outputs)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        layers = torch.randn(1, 24, 9, 12, generator=torch.Generator().manual_seed(5))
        seen = SimpleNamespace(all_hidden_states=layers, penultimate_hidden_states=layers[:, -2])
        return io.NodeOutput(seen)


class TestHeardSound(io.ComfyNode):
    """What an encoder of sound hears, layer by layer: AUDIO_ENCODER_OUTPUT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("draw", default=6)]
        outputs = [io.AudioEncoderOutput.Output()]
        return io.Schema(node_id="TestHeardSound", category=CATEGORY, inputs=inputs, outputs=outputs)

    @classmethod
    def execute(cls, draw) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(draw)
        layers = [torch.randn(1, 30, 768, generator=generator) for _ in range(13)]
        return io.NodeOutput({"encoded_audio_all_layers": layers})


class TestSplatModel(io.ComfyNode):
    """A MODEL and a VAE with what a preview of TripoSplat asks them for before sampling; no decoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSplatModel",
            category=CATEGORY,
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        model.model.diffusion_model.q_token_length = 4
        stage = SimpleNamespace(gaussians_per_point=1, gs=SimpleNamespace(model_channels=8))
        return io.NodeOutput(
            model, SimpleNamespace(first_stage_model=stage, vae_dtype=torch.float32, patcher=None)
        )


NODES = [TestSplatModel, TestHeardSound, TestModelPatch, TestSeenImage]
