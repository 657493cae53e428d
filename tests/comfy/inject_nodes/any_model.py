"""Test-only nodes for models of any family: what writes their files, and what feeds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import folder_paths
import torch
from comfy.cli_args import parser
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from safetensors.torch import save_file

from .category import CATEGORY
from .tiny_models import FILES, tensors_of


class TestWriteModel(io.ComfyNode):
    """Writes a model's file into a folder of models unless it is there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestWriteModel",
            category=CATEGORY,
            inputs=[
                io.Combo.Input("kind", options=list(FILES)),
                io.Combo.Input("folder", options=["diffusion_models", "checkpoints", "controlnet"]),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, kind, folder) -> io.NodeOutput:
        path = Path(folder_paths.get_folder_paths(folder)[0], f"any_{kind}.safetensors")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors, metadata = tensors_of(kind)
            save_file(tensors, path, metadata)
        return io.NodeOutput()


class TestShapedLatent(io.ComfyNode):
    """LATENT of any shape, such as 1,16,3,8,8, or of several with ; between them; drawn, or an empty one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestShapedLatent",
            category=CATEGORY,
            inputs=[io.String.Input("shape"), io.Int.Input("draw", default=-1, min=-1)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, shape, draw) -> io.NodeOutput:
        generator = torch.Generator().manual_seed(abs(draw))
        sizes = [[int(side) for side in part.split(",")] for part in shape.split(";")]
        parts = [torch.randn(size, generator=generator) * (draw >= 0) for size in sizes]
        return io.NodeOutput({"samples": parts[0] if len(parts) == 1 else NestedTensor(parts)})


class TestFlatLatent(io.ComfyNode):
    """A LATENT in several parts, such as video and sound, as one row of numbers each."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestFlatLatent",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        parts = latent["samples"].unbind()
        return io.NodeOutput({"samples": torch.cat([part.flatten(1) for part in parts], dim=1)})


class TestVideoStart(io.ComfyNode):
    """A prompt with the first image of a video, as WanImageToVideo leaves it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestVideoStart",
            category=CATEGORY,
            inputs=[io.Conditioning.Input("conditioning"), io.Latent.Input("latent")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, latent) -> io.NodeOutput:
        ((context, extra),) = conditioning
        start = latent["samples"]
        mask = torch.ones_like(start)[:, :4]
        mask[:, :, :1] = 0
        seen = SimpleNamespace(
            penultimate_hidden_states=torch.randn(1, 5, 1280, generator=torch.Generator().manual_seed(3))
        )
        extra = {**extra, "concat_latent_image": start, "concat_mask": mask, "clip_vision_output": seen}
        return io.NodeOutput([[context, extra]])


class TestKeyframe(io.ComfyNode):
    """A prompt with the first frame of a video, as MiniMaxH3ImageToVideo leaves it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestKeyframe",
            category=CATEGORY,
            inputs=[io.Conditioning.Input("conditioning"), io.Latent.Input("latent")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, latent) -> io.NodeOutput:
        ((context, extra),) = conditioning
        keyframe = {"resolved_frame_index": 0, "latent": latent["samples"]}
        extra = {**extra, "minimax_keyframes": [keyframe], "minimax_frame_count": 5}
        return io.NodeOutput([[context, extra]])


class TestTextMask(io.ComfyNode):
    """A prompt whose last tokens are padding, as text encoders with a mask leave it; or one that its model's own layers
    still have to prepare."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestTextMask",
            category=CATEGORY,
            inputs=[io.Conditioning.Input("conditioning"), io.Int.Input("padding", default=2, min=0)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, padding) -> io.NodeOutput:
        ((context, extra),) = conditioning
        if not padding:
            return io.NodeOutput([[context, {**extra, "unprocessed_ltxav_embeds": True}]])
        mask = torch.ones(context.shape[:2], dtype=torch.long)
        mask[:, -padding:] = 0
        return io.NodeOutput([[context, {**extra, "attention_mask": mask}]])


class TestPromptExtra(io.ComfyNode):
    """A prompt with a drawn tensor of `shape` under `name`, or a list of it, as nodes of its model leave it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPromptExtra",
            category=CATEGORY,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.String.Input("name"),
                io.String.Input("shape"),
                io.Boolean.Input("listed"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning, name, shape, listed) -> io.NodeOutput:
        ((context, extra),) = conditioning
        size = [int(side) for side in shape.split(",")]
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(31))
        return io.NodeOutput([[context, {**extra, name: [drawn] if listed else drawn}]])


class TestFirstFrameKept(io.ComfyNode):
    """A video LATENT whose first frame is kept, as Wan22ImageToVideoLatent leaves it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestFirstFrameKept",
            category=CATEGORY,
            inputs=[io.Latent.Input("latent")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, latent) -> io.NodeOutput:
        samples = latent["samples"]
        mask = torch.ones(1, 1, *samples.shape[2:])
        mask[:, :, 0] = 0
        first = torch.randn(samples[:, :, :1].shape, generator=torch.Generator().manual_seed(32))
        return io.NodeOutput({"samples": torch.cat([first, samples[:, :, 1:]], 2), "noise_mask": mask})


class TestForeignOption(io.ComfyNode):
    """A MODEL with an option that is an object of Python, as other packs leave them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestForeignOption",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.String.Input("name", default="my_pack")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, name) -> io.NodeOutput:
        model = model.clone()
        model.model_options["transformer_options"][name] = {"state": SimpleNamespace()}
        return io.NodeOutput(model)


class TestUnknownLoader(io.ComfyNode):
    """A MODEL as loaders of other packs give it: they note another way to load it, or none."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestUnknownLoader",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Boolean.Input("notes")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, notes) -> io.NodeOutput:
        model = model.clone()
        model.cached_patcher_init = (cls.execute, (model, notes)) if notes else None
        return io.NodeOutput(model)


class TestNumericFlags(io.ComfyNode):
    """What the pack hands on to ranks of a command line."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestNumericFlags",
            category=CATEGORY,
            inputs=[io.String.Input("line")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, line) -> io.NodeOutput:
        (flags,) = (module for name, module in sys.modules.items() if name.endswith(".host.comfyui_flags"))
        given = parser.parse_args(line.split())
        return io.NodeOutput(" ".join(flags.numeric_flags(given)))


class TestWrapper(io.ComfyNode):
    """A MODEL with a wrapper around its network that scales the prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestWrapper",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), io.Float.Input("scale", default=0.5)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, scale) -> io.NodeOutput:
        def wrapper(executor, *args, **kwargs):
            # The third is the prompt wherever the class has it there; to all models here that matters.
            return executor(args[0], args[1], args[2] * scale, *args[3:], **kwargs)

        model = model.clone()
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", wrapper)
        return io.NodeOutput(model)


class TestPlacesOfWeights(io.ComfyNode):
    """Where a MODEL's parameters lie: the devices, and how many bytes each has."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestPlacesOfWeights",
            category=CATEGORY,
            inputs=[io.Model.Input("model")],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        places: dict[str, int] = {}
        for parameter in model.model.diffusion_model.parameters():
            places[parameter.device.type] = places.get(parameter.device.type, 0) + parameter.nbytes
        return io.NodeOutput(json.dumps(places))


NODES = [
    TestFirstFrameKept,
    TestFlatLatent,
    TestForeignOption,
    TestNumericFlags,
    TestPlacesOfWeights,
    TestPromptExtra,
    TestShapedLatent,
    TestTextMask,
    TestUnknownLoader,
    TestVideoStart,
    TestWrapper,
    TestWriteModel,
    TestKeyframe,
]
