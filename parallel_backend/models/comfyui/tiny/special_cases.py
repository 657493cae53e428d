"""Cases that cases.json cannot express: models changed after they are built, calls with inputs that must match."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .weights import Call, operations, random

Calls = Callable[[str, int, int, int], Call]  # makes the inputs of a call in cases.json, by name


class _Motion(nn.Module):
    """Replaces Animate's face encoder, which is large and takes only 512 x 512 pictures. Its output has the same form,
    and the order of tokens does not depend on the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.motion = nn.Linear(3, 12)

    def get_motion(self, pictures: Tensor) -> Tensor:
        """[frames, 3, height, width] -> [frames, 12]."""
        motion: Tensor = self.motion(pictures.mean((2, 3)))
        return motion


class _Faces(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.faces = nn.Linear(12, 5 * width)

    def forward(self, motion: Tensor) -> Tensor:
        """[B, frames, 12] -> [B, frames / 4, 5, width]."""
        return self.faces(motion[:, ::4]).unflatten(2, (5, -1))


def _animate(module: Any) -> nn.Module:
    module.motion_encoder, module.face_encoder = _Motion(), _Faces(96)
    return module


def _humo(module: Any) -> nn.Module:
    """Replaces the audio encoder before the blocks, which has 40 million weights."""
    from comfy.ldm.wan.model import AudioProjModel

    module.audio_proj = AudioProjModel(2, 2, 12, 16, output_dim=1536, context_tokens=16, **operations())
    return module


def _anima(module: Any) -> nn.Module:
    """Replaces the text adapter, which has a fixed size, by a smaller one. The order of tokens does not change."""
    from comfy.ldm.anima.model import LLMAdapter

    module.llm_adapter = LLMAdapter(48, 48, 48, num_layers=1, num_heads=4, **operations())
    return module


MODELS: dict[str, Callable[[Any], nn.Module]] = {"animate": _animate, "humo": _humo, "anima": _anima}


def _patches(h: int, w: int) -> int:
    return -(-h // 2) * -(-w // 2)


def _flux_control(b: int, h: int, w: int, calls: Calls) -> Call:
    args, kw = calls("flux", b, h, w)
    n = _patches(h, w)
    control = {
        "input": [random(b, n, 128, seed=i) for i in range(3)],
        "output": [None, random(b, n, 128, seed=9), None],
    }
    return args, kw | {"control": control}


def _flux_mask(b: int, h: int, w: int, calls: Calls) -> Call:
    args, kw = calls("flux", b, h, w)
    n = 11 + _patches(h, w)
    return args, kw | {"attention_mask": random(b, n, n, seed=5)}


def _wan_frames(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call of Wan 2.2 5B image to video: a timestep for each frame."""
    (x, _), kw = calls("wan", b, h, w)
    kept = torch.ones(b, 1, 3, h, w)
    kept[:, :, :1] = 0
    return (x, torch.linspace(0, 900, 3).repeat(b, 1)), kw | {"denoise_mask": kept}


def _ltxv_tokens(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes an image to video call: a timestep for each token."""
    (x, _), kw = calls("ltx", b, h, w)
    return (x, torch.rand(b, 3 * h * w, generator=torch.Generator().manual_seed(1))), kw


def _ltxv_guides(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with two guides of one frame each after the video. A part of the first guide is left out."""
    (x, _), kw = calls("ltx", b, h, w)
    guided = torch.cat([x, random(b, 16, 2, h, w, seed=5)], 2)
    return (guided, _guided_timesteps(b, h, w)), kw | _guides(b, h, w) | {"attention_mask": _text_mask(b)}


def _text_mask(b: int) -> Tensor:
    mask = torch.ones(b, 9, dtype=torch.long)
    mask[:, :2] = 0
    return mask


def _guided_timesteps(b: int, h: int, w: int) -> Tensor:
    return torch.tensor([0.2, 0.5, 0.9, 0.0, 0.0]).repeat_interleave(h * w).repeat(b, 1)


def _guides(b: int, h: int, w: int) -> dict[str, Any]:
    kept = torch.ones(b, 1, 5, h, w)
    kept[:, :, 3:] = 0
    kept[:, :, 3, :1] = -1
    places = random(b, 3, 2 * h * w, 1, seed=6).abs() * 100
    guide = {"pre_filter_count": h * w, "strength": 1.0, "pixel_mask": None, "latent_shape": [1, h, w]}
    return {
        "denoise_mask": kept,
        "keyframe_idxs": torch.cat([places, places + 8], -1),
        "guide_attention_entries": [guide] * 2,
    }


def _strengths(h: int, w: int) -> dict[str, Any]:
    """Makes two guides: a weak one with a mask that is 0 in some places, and a strong one."""
    entry = {"pre_filter_count": h * w, "latent_shape": [1, h, w]}
    places = random(1, 1, 1, 8, 8, seed=8).abs().clamp(max=1)
    places[..., :4] = 0
    weak, strong = {"strength": 0.4, "pixel_mask": places}, {"strength": 3.0, "pixel_mask": None}
    return {"guide_attention_entries": [entry | weak, entry | strong]}


def _ltxav(b: int, h: int, w: int, calls: Calls) -> Call:
    t = torch.rand(b, 3, 1, generator=torch.Generator().manual_seed(1)).expand(b, 3, h * w).reshape(b, -1)
    latents = [random(b, 16, 3, h, w), random(b, 8, 7, 16)]
    kw = {"context": random(b, 9, 96), "attention_mask": None, "frame_rate": 25}
    return (latents, (t, torch.linspace(0.9, 0.5, b))), kw


def _ltxav_guides(b: int, h: int, w: int, calls: Calls) -> Call:
    ((picture, sound), (_, of_sound)), kw = _ltxav(b, h, w, calls)
    picture = torch.cat([picture, random(b, 16, 2, h, w, seed=5)], 2)
    masks = {"attention_mask": _text_mask(b), "audio_denoise_mask": torch.ones(b, 8, 7, 16)}
    return ([picture, sound], (_guided_timesteps(b, h, w), of_sound)), kw | _guides(b, h, w) | masks


def _strengths_of(
    guides: Callable[[int, int, int, Calls], Call], b: int, h: int, w: int, calls: Calls
) -> Call:
    args, kw = guides(b, h, w, calls)
    return args, kw | _strengths(h, w)


def _minimax(b: int, h: int, w: int, calls: Calls, **payload: Any) -> Call:
    """Makes a call with one row for any `b`, since the model takes no more."""
    h, w = h + h % 2, w + w % 2
    latents = [random(1, 24, 2, h, w), random(1, 32, 2, 5)]
    kw = {"context": random(1, 9, 48), "minimax_payload": {"seed": 3, **payload}}
    return (latents, torch.tensor([600.0])), kw


def _minimax_keyframes(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with a first frame, and with text in which some tokens stand for a picture."""
    frame = random(1, 24, 1, h + h % 2, w + w % 2, seed=5)
    tags = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1])
    keyframes = [{"resolved_frame_index": 0, "latent": frame}]
    frames = {"keyframes": keyframes, "frame_count": 5, "cond_video_latents": [frame]}
    return _minimax(b, h, w, calls, **frames, text_token_tags=tags)


def _minimax_references(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with a picture and a sound as references."""
    picture, sound = random(1, 24, 1, 4, 6, seed=6), random(1, 32, 2, 3, seed=7)
    refs = [{"kind": "image", "latent_h": 4, "latent_w": 6}, {"kind": "audio", "ref_audio_t": 3}]
    return _minimax(b, h, w, calls, refs=refs, cond_video_latents=[picture], cond_audio_latents=[sound])


def _kandinsky5_i2v(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with a first frame and masked text."""
    args, kw = calls("kandinsky5", b, h, w)
    frame = random(b, 16, 1, h + h % 2, w + w % 2, seed=5)
    return args, kw | {"attention_mask": _text_mask(b), "time_dim_replace": frame}


def _upscaler(b: int, h: int, w: int, calls: Calls) -> Call:
    times = torch.linspace(900, 500, b)
    return (random(b, 7, h, w), times), {"context": random(b, 7, 48), "y": torch.arange(b)}


def _sdxl_controlnet(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with residuals at each resolution, and a constant one. Blocks take them from the lists' ends."""
    args, kw = calls("sdxl", b, h, w)
    half, quarter = ((-(-h // n), -(-w // n)) for n in (2, 4))
    middle = [random(b, 128, *quarter, seed=2)]
    output = [None, random(b, 128, 1, 1, seed=3), random(b, 128, *quarter, seed=1)]
    of_input = [
        random(b, 64, *half, seed=5),
        random(b, 32, *half, seed=6),
        None,
        random(b, 32, h, w, seed=4),
        None,
    ]
    return args, kw | {"control": {"output": output, "middle": middle, "input": of_input}}


def _svd(b: int, h: int, w: int, calls: Calls) -> Call:
    """Makes a call with `b` frames: videos of three frames if `b` divides by 3, else one video."""
    kw = {"context": random(b, 1, 48), "y": random(b, 64), "num_video_frames": b if b % 3 else 3}
    return (random(b, 8, h, w), torch.full((b,), 900.0)), kw


CALLS: dict[str, Callable[[int, int, int, Calls], Call]] = {
    "flux + controlnet": _flux_control,
    "flux + full mask": _flux_mask,
    "wan, time per frame": _wan_frames,
    "ltx, time per token": _ltxv_tokens,
    "ltx, guides": _ltxv_guides,
    "ltx, strengths": partial(_strengths_of, _ltxv_guides),
    "ltx-2": _ltxav,
    "ltx-2, guides": _ltxav_guides,
    "ltx-2, strengths": partial(_strengths_of, _ltxav_guides),
    "minimax": _minimax,
    "minimax, first frame": _minimax_keyframes,
    "minimax, references": _minimax_references,
    "kandinsky5 i2v": _kandinsky5_i2v,
    "sd 4x upscaler": _upscaler,
    "sdxl + controlnet": _sdxl_controlnet,
    "svd": _svd,
}
