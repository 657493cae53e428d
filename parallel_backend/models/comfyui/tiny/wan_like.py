"""Tiny models of Wan's variants, which differ in what goes in beside the video, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .video import wan, wan_inputs
from .weights import Call, operations, random

_SIZES = dict(dim=96, ffn_dim=192, freq_dim=32, text_dim=48, out_dim=16, num_heads=4, num_layers=4)


def _even(h: int, w: int) -> tuple[int, int]:
    """As ComfyUI's nodes give conditioning for Wan, whose patches are 2 x 2."""
    return h + h % 2, w + w % 2


def wan_beside(b: int, h: int, w: int) -> Call:
    """Frames after the video (Phantom)."""
    args, kw = wan_inputs(b, h, w)
    return args, kw | dict(time_dim_concat=random(b, 16, 1, h, w, seed=5))


def wan_streams(b: int, h: int, w: int) -> Call:
    """Pictures in context (Bernini)."""
    args, kw = wan_inputs(b, h, w)
    return args, kw | dict(context_latents=[random(b, 16, 1, 6, 4, seed=5), random(b, 16, 2, 4, 4, seed=6)])


def wan_fun() -> nn.Module:
    return wan(in_dim_ref_conv=16)


def wan_fun_inputs(b: int, h: int, w: int) -> Call:
    h, w = _even(h, w)
    args, kw = wan_inputs(b, h, w)
    return args, kw | dict(reference_latent=random(b, 16, h, w, seed=5))


def camera() -> nn.Module:
    from comfy.ldm.wan.model import CameraWanModel

    return CameraWanModel(in_dim=32, in_dim_control_adapter=6, **_SIZES, **operations())


def camera_inputs(b: int, h: int, w: int) -> Call:
    h, w = _even(h, w)
    return (random(b, 32, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48),
        clip_fea=random(b, 5, 1280),
        camera_conditions=random(b, 6, 3, 8 * h, 8 * w, seed=5),
    )


def scail() -> nn.Module:
    from comfy.ldm.wan.model import SCAILWanModel

    return SCAILWanModel(in_dim=20, **_SIZES, **operations())


def scail2() -> nn.Module:
    from comfy.ldm.wan.model import SCAIL2WanModel

    # Its base class hands the type on twice, so ComfyUI builds it without one.
    return SCAIL2WanModel(in_dim=20, mask_in_dim=28, **_SIZES, **operations())


def scail_inputs(b: int, h: int, w: int) -> Call:
    """A pose at half the size beside the video, and a reference before it."""
    h, w = _even(h, w)
    return (random(b, 20, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48),
        clip_fea=random(b, 5, 1280),
        reference_latent=random(b, 20, 1, h, w, seed=5),
        pose_latents=random(b, 20, 3, h // 2, w // 2, seed=6),
    )


def scail2_inputs(b: int, h: int, w: int) -> Call:
    args, kw = scail_inputs(b, h, w)
    frames, (h, w) = args[0].shape[2] + 1, args[0].shape[3:]
    return args, kw | dict(
        ref_mask_latents=random(b, 28, frames, h, w, seed=7),
        sam_latents=random(b, 28, 3, h // 2, w // 2, seed=8),
        ref_mask_flag=torch.tensor(False),
    )


class _Motion(nn.Module):
    """In the place of Animate's encoder of faces, which takes pictures of 512 x 512 only and is large: what goes into
    the blocks has the same form, and another encoder changes no order of tokens."""

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


def animate() -> nn.Module:
    from comfy.ldm.wan.model_animate import AnimateWanModel

    module = AnimateWanModel(in_dim=36, **_SIZES | dict(num_layers=5), **operations())
    module.motion_encoder, module.face_encoder = _Motion(), _Faces(_SIZES["dim"])
    return module


def animate_pose(b: int, h: int, w: int) -> Call:
    h, w = _even(h, w)
    return (random(b, 36, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48),
        clip_fea=random(b, 5, 1280),
        pose_latents=random(b, 16, 2, h, w, seed=5),
    )


def animate_face(b: int, h: int, w: int) -> Call:
    """Faces are read between blocks, frame by frame."""
    args, kw = animate_pose(b, h, w)
    return args, kw | dict(face_pixel_values=random(b, 3, 8, 4, 4, seed=6))


def s2v() -> nn.Module:
    from comfy.ldm.wan.model import WanModel_S2V

    return WanModel_S2V(
        in_dim=16, audio_dim=24, num_audio_token=2, audio_inject_layers=[0, 2], **_SIZES, **operations()
    )


def s2v_inputs(b: int, h: int, w: int) -> Call:
    """A reference, and frames from before that are packed ever smaller."""
    args, kw = wan_inputs(b, 8 * -(-h // 8), 8 * -(-w // 8))
    h, w = args[0].shape[3:]
    return args, kw | dict(
        reference_latent=random(b, 16, 1, h, w, seed=5),
        control_video=random(b, 16, 3, h, w, seed=6),
        reference_motion=random(b, 16, 19, h, w, seed=7),
    )


def s2v_sound(b: int, h: int, w: int) -> Call:
    """Sound is added between blocks, frame by frame."""
    args, kw = s2v_inputs(b, h, w)
    return args, kw | dict(audio_embed=random(b, 25, 24, 12, seed=8))


def dancer() -> nn.Module:
    from comfy.ldm.wan.model_wandancer import WanDancerModel

    return WanDancerModel(
        in_dim=36,
        audio_inject_layers=[0, 2],
        music_dim=64,
        music_heads=2,
        music_feature_dim=35,
        music_latent_dim=64,
        **_SIZES,
        **operations(),
    )


def dancer_inputs(b: int, h: int, w: int, **extra: Any) -> Call:
    return (random(b, 36, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48),
        clip_fea=random(b, 5, 1280),
        clip_fea_ref=random(b, 4, 1280, seed=5),
        **extra,
    )


def dancer_slow(b: int, h: int, w: int) -> Call:
    """At another rate than 30 frames per second, another first and last layer compute."""
    return dancer_inputs(b, h, w, fps=24.0, audio_inject_scale=0.8)


def dancer_music(b: int, h: int, w: int) -> Call:
    """Music is added between blocks, to eight parts of each frame."""
    return dancer_inputs(b, 8 * -(-h // 8), 8 * -(-w // 8), audio_embed=random(b, 9, 35, seed=6))


def humo() -> nn.Module:
    from comfy.ldm.wan.model import AudioProjModel, HumoWanModel

    module = HumoWanModel(in_dim=16, **_SIZES, **operations())
    # The one it builds has forty million weights, in front of the blocks.
    module.audio_proj = AudioProjModel(2, 2, 12, 16, output_dim=1536, context_tokens=16, **operations())
    return module


def humo_inputs(b: int, h: int, w: int) -> Call:
    """Sound is read inside of blocks, frame by frame."""
    h, w = _even(h, w)
    args, kw = wan_inputs(b, h, w)
    return args, kw | dict(
        reference_latent=random(b, 16, 1, h, w, seed=5), audio_embed=random(b, 3, 2, 2, 12, seed=6)
    )
