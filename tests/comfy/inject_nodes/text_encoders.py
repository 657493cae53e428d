"""Encoders of ComfyUI's own classes, of tiny sizes, for texts (with its own tokenizers), pictures and sound."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import folder_paths
import torch
from comfy.audio_encoders.audio_encoders import AudioEncoderModel
from comfy.clip_vision import ClipVisionModel
from comfy.text_encoders import flux, hunyuan_video, lumina2, qwen_image, wan, z_image
from comfy_api.latest import io
from safetensors.torch import load_file, save_file

from .category import CATEGORY
from .outputs import output_path

_CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 4}
_T5 = {"d_ff": 64, "d_kv": 16, "d_model": 32, "num_heads": 2, "num_layers": 4}
_VISION = _CLIP | {
    "model_type": "clip_vision_model",
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "projection_dim": 32,
}
_HEARING = {
    "model_type": "wav2vec2",
    "embed_dim": 64,
    "num_heads": 2,
    "num_layers": 4,
    "conv_norm": False,
    "conv_bias": False,
    "do_normalize": False,
    "do_stable_layer_norm": False,
}
_LLM = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_WIDTHS = ("hidden_size", "intermediate_size", "d_model", "d_ff")
_SMALL = {"vocab_size": 400}  # of encoders with the tokenizer in PIECES
PIECES = "pieces.model"  # a sentencepiece model, which the files of such encoders carry

# (class of the encoder, class of the tokenizer, sizes by the key under which ComfyUI looks for them)
_KINDS = {
    "clip_l": (comfy.sd1_clip.SD1ClipModel, comfy.sd1_clip.SD1Tokenizer, {"clip_l": _CLIP}),
    "t5": (flux.flux_clip(), flux.FluxTokenizer, {"clip_l": _CLIP, "t5xxl": _T5}),
    "sdxl": (
        comfy.sdxl_clip.SDXLClipModel,
        comfy.sdxl_clip.SDXLTokenizer,
        {"clip_l": _CLIP, "clip_g": _CLIP},
    ),
    "umt5": (wan.te(), wan.WanT5Tokenizer, {"umt5xxl": _T5 | _SMALL}),
    "qwen": (qwen_image.te(), qwen_image.QwenImageTokenizer, {"qwen25_7b": _LLM}),
    "qwen3": (z_image.te(), z_image.ZImageTokenizer, {"qwen3_4b": _LLM}),
    "gemma": (lumina2.te(), lumina2.LuminaTokenizer, {"gemma2_2b": _LLM | _SMALL}),
    "llama": (
        hunyuan_video.hunyuan_video_clip(),
        hunyuan_video.HunyuanVideoTokenizer,
        {"clip_l": _CLIP, "llama": _LLM},
    ),
}


class TestEncoder(io.ComfyNode):
    """A CLIP of random weights, which lie in `clip_name` as a loader's do."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestEncoder",
            category=CATEGORY,
            inputs=[
                io.Combo.Input("kind", options=list(_KINDS)),
                io.String.Input("clip_name"),
                io.Int.Input("draw", default=0),
                io.Int.Input("scale", default=1, optional=True, tooltip="times as wide"),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, kind, clip_name, draw, scale=1) -> io.NodeOutput:
        path = Path(folder_paths.models_dir) / "text_encoders" / clip_name
        clip = _make(kind, scale)
        if not path.exists():
            generator = torch.Generator().manual_seed(draw)
            state = clip.cond_stage_model.state_dict()
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: _drawn(one, generator) for name, one in state.items()}, path)
        clip.cond_stage_model.load_state_dict(load_file(path))
        return io.NodeOutput(clip)


def _make(kind: str, scale: int) -> comfy.sd.CLIP:
    model, tokenizer, sizes = _KINDS[kind]

    target = types.SimpleNamespace(params={}, clip=model, tokenizer=tokenizer)
    options = {f"{name}_model_config": _scaled(one, scale) for name, one in sizes.items()}
    options["dtype"] = torch.float32
    # Only some of the tests write it.
    pieces = Path(folder_paths.models_dir) / "text_encoders" / PIECES
    model = torch.frombuffer(bytearray(pieces.read_bytes() if pieces.exists() else b"-"), dtype=torch.uint8)
    return comfy.sd.CLIP(
        target,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        tokenizer_data={"spiece_model": model},
        model_options=options,
    )


def _scaled(sizes: dict[str, int], scale: int) -> dict[str, int]:
    return {name: value * (scale if name in _WIDTHS else 1) for name, value in sizes.items()}


def _draw(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    model.load_state_dict({name: _drawn(one, generator) for name, one in model.state_dict().items()})


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    return (0.3 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


class TestVision(io.ComfyNode):
    """A CLIP_VISION of random weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(node_id="TestVision", category=CATEGORY, inputs=[], outputs=[io.ClipVision.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        vision = ClipVisionModel(_VISION)
        _draw(vision.model)
        return io.NodeOutput(vision)


class TestHearing(io.ComfyNode):
    """An AUDIO_ENCODER of random weights, and a second of sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.AudioEncoder.Output(), io.Audio.Output()]
        return io.Schema(node_id="TestHearing", category=CATEGORY, inputs=[], outputs=outputs)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        encoder = AudioEncoderModel(dict(_HEARING))
        _draw(encoder.model)
        sound = torch.randn(1, 1, 16000, generator=torch.Generator().manual_seed(1))
        return io.NodeOutput(encoder, {"waveform": sound, "sample_rate": 16000})


class TestEncoderLora(io.ComfyNode):
    """Puts a LoRA on a CLIP by ComfyUI's own function, without the MODEL that its node wants."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [
            io.Clip.Input("clip"),
            io.String.Input("lora_name"),
            io.Float.Input("strength", default=1.0),
        ]
        return io.Schema(
            node_id="TestEncoderLora", category=CATEGORY, inputs=inputs, outputs=[io.Clip.Output()]
        )

    @classmethod
    def execute(cls, clip, lora_name, strength) -> io.NodeOutput:
        lora = load_file(folder_paths.get_full_path("loras", lora_name))
        return io.NodeOutput(comfy.sd.load_lora_for_models(None, clip, lora, 0.0, strength)[1])


class TestMapped(io.ComfyNode):
    """How many bytes of a CLIP's weights are pages of a file, and how many there are in all."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.String.Input("file")]
        return io.Schema(node_id="TestMapped", category=CATEGORY, inputs=inputs, outputs=[io.String.Output()])

    @classmethod
    def execute(cls, clip, file) -> io.NodeOutput:
        lines = [
            line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)
        ]
        ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
        weights = list(clip.cond_stage_model.parameters())
        mapped = [w for w in weights if any(begin <= w.data_ptr() < end for begin, end in ranges)]
        return io.NodeOutput(f"{sum(w.nbytes for w in mapped)} {sum(w.nbytes for w in weights)}")


class TestWrittenInto(io.ComfyNode):
    """A CLIP whose first encoder answers with the half of what it found: a pack's function in place of a method."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip")]
        return io.Schema(
            node_id="TestWrittenInto", category=CATEGORY, inputs=inputs, outputs=[io.Clip.Output()]
        )

    @classmethod
    def execute(cls, clip) -> io.NodeOutput:
        found = clip.clone()
        before = found.cond_stage_model.clip_l.encode_token_weights

        def halved(tokens):
            cond, pooled, *more = before(tokens)
            return (0.5 * cond, pooled, *more)

        found.patcher.add_object_patch("clip_l.encode_token_weights", halved)
        return io.NodeOutput(found)


class TestSaveTensors(io.ComfyNode):
    """Write the tensors of anything as safetensors, by their place in it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TestSaveTensors",
            category=CATEGORY,
            inputs=[io.AnyType.Input("value"), io.String.Input("path", default="text.safetensors")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, value, path) -> io.NodeOutput:
        save_file({name: one.contiguous().cpu() for name, one in _tensors(value, "")}, output_path(path))
        return io.NodeOutput()


def _tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value.clone()
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _tensors(one, f"{name}.{number}")
    elif isinstance(value, dict) or type(value).__name__ == "Output":  # of CLIP vision
        for key, one in (value if isinstance(value, dict) else vars(value)).items():
            yield from _tensors(one, f"{name}.{key}")


NODES = [
    TestEncoder,
    TestEncoderLora,
    TestHearing,
    TestMapped,
    TestSaveTensors,
    TestVision,
    TestWrittenInto,
]
