"""Tiny models that compute on pixels, without a VAE, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .flux_like import CHROMA
from .image import zimage
from .weights import Call, known, operations, random


def chroma_radiance() -> nn.Module:
    from comfy.ldm.chroma_radiance.model import ChromaRadiance, ChromaRadianceParams

    config: dict[str, Any] = CHROMA | dict(
        in_channels=3,
        out_channels=3,
        patch_size=4,
        nerf_hidden_size=16,
        nerf_mlp_ratio=2,
        nerf_depth=2,
        nerf_max_freqs=4,
        nerf_tile_size=0,
        nerf_final_head_type="conv",
        nerf_embedder_dtype=torch.float32,
        use_x0=False,
        use_sequential_txt_ids=True,
    )
    return ChromaRadiance(**known(config, ChromaRadianceParams), **operations())


def chroma_radiance_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 3, 2 * h, 2 * w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 11, 48), guidance=torch.zeros(b)
    )


def zimage_pixels() -> nn.Module:
    from comfy.ldm.lumina.model import NextDiTPixelSpace

    return zimage(
        NextDiTPixelSpace,
        in_channels=3,
        patch_size=4,
        decoder_hidden_size=32,
        decoder_num_res_blocks=2,
        decoder_max_freqs=4,
    )


def zimage_pixels_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 3, 2 * h, 2 * w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 11, 48), num_tokens=11
    )


_PIXELDIT: dict[str, Any] = dict(
    num_groups=4,
    hidden_size=96,
    pixel_hidden_size=8,
    pixel_attn_hidden_size=64,
    pixel_num_groups=4,
    patch_depth=4,
    pixel_depth=1,
    patch_size=4,
    txt_embed_dim=48,
    txt_max_length=16,
)


def pixeldit() -> nn.Module:
    from comfy.ldm.pixeldit.model import PixDiT_T2I

    return PixDiT_T2I(**_PIXELDIT, **operations())


def pixeldit_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 3, 2 * h, 2 * w), torch.linspace(900, 500, b)), dict(context=random(b, 9, 48))


def pid() -> nn.Module:
    from comfy.ldm.pixeldit.pid import PidNet

    return PidNet(
        lq_hidden_dim=16,
        lq_num_res_blocks=1,
        sr_scale=2,
        latent_spatial_down_factor=2,
        pit_lq_inject=True,
        **_PIXELDIT,
        **operations(),
    )


def pid_inputs(b: int, h: int, w: int) -> Call:
    """A latent of half the size, which is added before every other block."""
    args, kw = pixeldit_inputs(b, h, w)
    return args, kw | dict(
        lq_latent=random(b, 16, -(-h // 2), -(-w // 2), seed=5), degrade_sigma=torch.full((b,), 0.3)
    )
