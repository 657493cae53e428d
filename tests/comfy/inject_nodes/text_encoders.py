"""Nodes that return tiny encoders of ComfyUI's own classes, for texts (with its tokenizers), pictures and sound."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from unittest import mock

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import folder_paths
import torch
from comfy.audio_encoders.audio_encoders import AudioEncoderModel
from comfy.clip_vision import ClipVisionModel
from comfy.text_encoders import flux, hunyuan_video, lumina2, qwen_image, qwen_vl, wan, z_image
from comfy_api.latest import io
from safetensors.torch import load_file, save_file

from .node import node

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
# The part of Qwen2.5-VL that sees images has a fixed width; its 32 layers would be 2.5 GB.
_ONE_LAYER = partialmethod(qwen_vl.Qwen2VLVisionTransformer.__init__, num_layers=1)
_WIDTHS = ("hidden_size", "intermediate_size", "d_model", "d_ff")
_SMALL = {"vocab_size": 400}  # for encoders whose tokenizer is in PIECES
PIECES = "pieces.model"  # a sentencepiece model; real files of such encoders contain it

# {kind: (class of the encoder, class of the tokenizer, {ComfyUI's key for the sizes: sizes})}
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


@node("TestEncoder")
def encoder(kind: str, clip_name: str, draw: int, scale: int = 1) -> io.Clip:
    """Returns a CLIP with the weights in the file `clip_name`; writes random ones first if there is no such file.
    `scale`: times as wide."""
    path = Path(folder_paths.models_dir) / "text_encoders" / clip_name
    clip = _make(kind, scale)
    if not path.exists():
        generator = torch.Generator().manual_seed(draw)
        state = clip.cond_stage_model.state_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: _drawn(one, generator) for name, one in state.items()}, path)
    clip.cond_stage_model.load_state_dict(load_file(path))
    return clip


def _make(kind: str, scale: int) -> comfy.sd.CLIP:
    model, tokenizer, sizes = _KINDS[kind]

    target = types.SimpleNamespace(params={}, clip=model, tokenizer=tokenizer)
    options = {f"{name}_model_config": _scaled(one, scale) for name, one in sizes.items()}
    options["dtype"] = torch.float32
    # Only some tests write this file.
    pieces = Path(folder_paths.models_dir) / "text_encoders" / PIECES
    model = torch.frombuffer(bytearray(pieces.read_bytes() if pieces.exists() else b"-"), dtype=torch.uint8)
    with mock.patch.object(qwen_vl.Qwen2VLVisionTransformer, "__init__", _ONE_LAYER):
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


@node("TestVision")
def vision() -> io.ClipVision:
    """Returns a CLIP_VISION with random weights."""
    found = ClipVisionModel(_VISION)
    _draw(found.model)
    return found


@node("TestHearing")
def hearing() -> tuple[io.AudioEncoder, io.Audio]:
    """Returns an AUDIO_ENCODER with random weights, and one second of sound."""
    found = AudioEncoderModel(dict(_HEARING))
    _draw(found.model)
    sound = torch.randn(1, 1, 16000, generator=torch.Generator().manual_seed(1))
    return [found, {"waveform": sound, "sample_rate": 16000}]


@node("TestEncoderLora")
def encoder_lora(clip: io.Clip, lora_name: str, strength: float) -> io.Clip:
    """Puts a LoRA on a CLIP with ComfyUI's own function, without the MODEL that its node needs."""
    lora = load_file(folder_paths.get_full_path("loras", lora_name))
    return comfy.sd.load_lora_for_models(None, clip, lora, 0.0, strength)[1]


@node("TestMapped")
def mapped(clip: io.Clip, file: str) -> str:
    """Returns two numbers: the bytes of a CLIP's weights that are pages of the mapped file, and all their bytes."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(file)]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    weights = list(clip.cond_stage_model.parameters())
    found = [w for w in weights if any(begin <= w.data_ptr() < end for begin, end in ranges)]
    return f"{sum(w.nbytes for w in found)} {sum(w.nbytes for w in weights)}"


_undo = contextlib.ExitStack()


@node("TestOtherLayersMethod", anew=True)
def other_layers_method(clip: io.Clip, undo: bool = False) -> io.Clip:
    """Has an encoder's first layer compute with a part of its second, by that part's own method; `undo`: no longer."""
    first, second = (
        clip.cond_stage_model.clip_l.transformer.text_model.encoder.layers[i].mlp.fc1 for i in (0, 1)
    )
    _undo.close()
    if not undo:
        # A stand-in's layer has one.
        before = {name: value for name, value in vars(first).items() if name == "forward"}
        _undo.callback(vars(first).update, before)
        _undo.callback(vars(first).pop, "forward")
        first.forward = second.forward
    return clip


@node("TestWrittenInto")
def written_into(clip: io.Clip) -> io.Clip:
    """Returns a CLIP whose first encoder returns half of its result: a pack's function replaces its method."""
    found = clip.clone()
    before = found.cond_stage_model.clip_l.encode_token_weights

    def halved(tokens):
        cond, pooled, *more = before(tokens)
        return (0.5 * cond, pooled, *more)

    found.patcher.add_object_patch("clip_l.encode_token_weights", halved)
    return found


def _total(seen: torch.Tensor) -> Callable[[torch.nn.Module], torch.Tensor]:
    total = seen

    def add(module: torch.nn.Module) -> torch.Tensor:
        nonlocal total
        total = total + seen
        return total

    return add


def _attribute(seen: torch.Tensor) -> Callable[[torch.nn.Module], torch.Tensor]:
    def add(module: torch.nn.Module) -> torch.Tensor:
        module.seen = module.seen + seen
        return module.seen

    return add


_MEMORIES = {
    "a closure": _total,
    "an attribute of the encoder": _attribute,
    "a random generator": lambda seen: lambda module: seen * torch.randn(1),
}


def _shifted(clip: io.Clip, place: str) -> io.Clip:
    """Returns a CLIP with a function in place of the first encoder's method. It shifts each answer by what it has kept
    in earlier calls. `place`: where it keeps that."""
    found, step = clip.clone(), _MEMORIES[place](torch.full((), 0.1))
    before = found.cond_stage_model.clip_l.encode_token_weights

    def shifted(tokens):
        cond, pooled, *more = before(tokens)
        return (cond + step(before.__self__), pooled, *more)

    found.patcher.add_object_patch("clip_l.encode_token_weights", shifted)
    return found


@node("TestCounting")
def counting(clip: io.Clip) -> io.Clip:
    """Returns a CLIP that shifts each text more than the one before."""
    return _shifted(clip, "a closure")


@node("TestSecondText")
def second_text(clip: io.Clip, place: str) -> io.Conditioning:
    """Encodes two texts with a CLIP that keeps something from one to the next (_shifted), and returns the second."""
    found = _shifted(clip, place)
    found.cond_stage_model.clip_l.seen = 0.0
    torch.manual_seed(5)
    found.encode_from_tokens_scheduled(found.tokenize("a red cat"))
    return found.encode_from_tokens_scheduled(found.tokenize("a blue dog"))
