"""Tiny models of two streams, text beside image, and inputs for them: Flux.1, Flux.2, Chroma, HunyuanVideo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .weights import Call, known, operations, random


def flux(**over: Any) -> nn.Module:
    from comfy.ldm.flux.model import Flux, FluxParams

    config = dict(
        in_channels=16,
        out_channels=16,
        vec_in_dim=32,
        context_in_dim=48,
        hidden_size=128,
        mlp_ratio=4.0,
        num_heads=4,
        depth=3,
        depth_single_blocks=3,
        axes_dim=[8, 12, 12],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=True,
        txt_ids_dims=[],
    )
    return Flux(**known(config | over, FluxParams), **operations())


def flux_inputs(b: int, h: int, w: int, **extra: Any) -> Call:
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 11, 48), y=random(b, 32), guidance=torch.full((b,), 3.5), **extra
    )


def flux_refs(b: int, h: int, w: int) -> Call:
    args, kw = flux_inputs(b, h, w)
    return args, kw | dict(ref_latents=[random(b, 16, 6, 10, seed=3)])


def flux_control(b: int, h: int, w: int) -> Call:
    args, kw = flux_inputs(b, h, w)
    n = -(-h // 2) * -(-w // 2)
    return args, kw | dict(
        control=dict(
            input=[random(b, n, 128, seed=i) for i in range(3)],
            output=[None, random(b, n, 128, seed=9), None],
        )
    )


def flux_mask(b: int, h: int, w: int) -> Call:
    args, kw = flux_inputs(b, h, w)
    n = 11 + -(-h // 2) * -(-w // 2)
    return args, kw | dict(attention_mask=random(b, n, n, seed=5))


def flux2() -> nn.Module:
    return flux(
        in_channels=32,
        out_channels=32,
        vec_in_dim=None,
        patch_size=1,
        global_modulation=True,
        mlp_silu_act=True,
        qkv_bias=False,
        ops_bias=False,
        axes_dim=[8, 8, 8, 8],
        txt_ids_dims=[3],
        default_ref_method="index",
        ref_index_scale=10.0,
        mlp_ratio=3.0,
    )


def flux2_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 32, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 11, 48), guidance=torch.full((b,), 3.5), ref_latents=[random(b, 32, 4, 5, seed=2)]
    )


CHROMA: dict[str, Any] = dict(
    in_channels=64,
    out_channels=64,
    context_in_dim=48,
    hidden_size=128,
    mlp_ratio=4.0,
    num_heads=4,
    depth=19,
    depth_single_blocks=38,
    axes_dim=[8, 12, 12],
    theta=10000,
    patch_size=2,
    qkv_bias=True,
    in_dim=64,
    out_dim=128,
    hidden_dim=64,
    n_layers=2,
    vec_in_dim=None,
    txt_ids_dims=[],
)


def chroma() -> nn.Module:
    from comfy.ldm.chroma.model import Chroma, ChromaParams

    return Chroma(**known(CHROMA, ChromaParams), **operations())


def chroma_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 11, 48), guidance=torch.zeros(b)
    )


def hunyuan(**over: Any) -> nn.Module:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo, HunyuanVideoParams

    config = dict(
        in_channels=16,
        out_channels=16,
        vec_in_dim=32,
        context_in_dim=48,
        hidden_size=128,
        mlp_ratio=4.0,
        num_heads=4,
        depth=3,
        depth_single_blocks=3,
        axes_dim=[8, 12, 12],
        theta=256,
        patch_size=[1, 2, 2],
        qkv_bias=True,
        guidance_embed=True,
        byt5=False,
        meanflow=False,
        use_cond_type_embedding=False,
        vision_in_dim=None,
        meanflow_sum=False,
    )
    return HunyuanVideo(**known(config | over, HunyuanVideoParams), **operations())


def hunyuan_inputs(b: int, h: int, w: int, mask: bool = True) -> Call:
    h, w = h + h % 2, w + w % 2
    m = torch.ones(1, 9, dtype=torch.long)
    m[:, 6:] = 0
    return (random(b, 16, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 9, 48),
        y=random(b, 32),
        guidance=torch.full((b,), 6000.0),
        attention_mask=m if mask else None,
    )


def hunyuan_i2v(
    b: int, h: int, w: int
) -> Call:  # "replace" image to video: the first frame has a timestep of its own
    args, kw = hunyuan_inputs(b, h, w, mask=False)
    return args, kw | dict(
        guiding_frame_index=torch.zeros(b), guidance=None
    )  # with it, stock fails for batches


def hunyuan15() -> nn.Module:
    return hunyuan(
        vec_in_dim=None,
        guidance_embed=False,
        byt5=True,
        use_cond_type_embedding=True,
        vision_in_dim=40,
        patch_size=[1, 1, 1],
        in_channels=33,
    )


def hunyuan15_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 33, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 9, 48), txt_byt5=random(b, 4, 1472), clip_fea=random(b, 6, 40)
    )
