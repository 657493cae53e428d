"""Tiny models of shapes in space, whose tokens have no order, and inputs for them."""

from __future__ import annotations

import torch
from torch import nn

from .weights import Call, operations, random


def hunyuan3d() -> nn.Module:
    from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2

    return Hunyuan3Dv2(
        in_channels=16,
        context_in_dim=48,
        hidden_size=128,
        num_heads=4,
        depth=3,
        depth_single_blocks=3,
        guidance_embed=True,
        **operations(),
    )


def hunyuan3d_inputs(b: int, h: int, w: int) -> Call:
    """A shape: tokens in no order."""
    return (random(b, 16, h * w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), guidance=torch.full((b,), 5.0)
    )


def hunyuan3d_21() -> nn.Module:
    from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain

    return HunYuanDiTPlain(
        in_channels=16,
        hidden_size=64,
        context_dim=48,
        depth=5,
        num_heads=4,
        num_moe_layers=2,
        guidance_cond_proj_dim=64,
        num_experts=4,
        **operations(),
    )


def hunyuan3d_21_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h * w), torch.linspace(0.9, 0.5, b)), dict(context=random(b, 9, 48))


def triposplat() -> nn.Module:
    from comfy.ldm.triposplat.model import LatentSeqMMFlowModel

    return LatentSeqMMFlowModel(
        q_token_length=64,
        model_channels=96,
        cond_channels=48,
        num_blocks=4,
        num_head_channels=24,
        cond2_channels=16,
        **operations(),
    )


def triposplat_inputs(b: int, h: int, w: int) -> Call:
    """Always as many tokens, and a camera."""
    return ([random(b, 64, 16), random(b, 1, 5)], torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), ref_latents=[random(b, 16, 2, 3, seed=5)]
    )
