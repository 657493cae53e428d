"""Tiny models of other image families, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .weights import Call, operations, random


def qwen(**over: Any) -> nn.Module:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        **(
            dict(
                in_channels=64,
                out_channels=16,
                num_layers=4,
                attention_head_dim=32,
                num_attention_heads=4,
                joint_attention_dim=48,
                axes_dims_rope=(8, 12, 12),
            )
            | over
        ),
        **operations(),
    )


def qwen_inputs(b: int, h: int, w: int, **extra: Any) -> Call:
    return (random(b, 16, 1, h, w), torch.linspace(0.9, 0.5, b)), dict(context=random(b, 13, 48), **extra)


def qwen_mask(b: int, h: int, w: int) -> Call:
    args, kw = qwen_inputs(b, h, w)
    mask = torch.ones(b, 13, dtype=torch.long)
    mask[:, 9:] = 0
    return args, kw | dict(attention_mask=mask)


def qwen_edit(b: int, h: int, w: int) -> Call:
    args, kw = qwen_inputs(b, h, w)
    return args, kw | dict(
        ref_latents=[random(b, 16, 1, 6, 8, seed=3), random(b, 16, 1, 4, 4, seed=4)],
        ref_latents_method="index_timestep_zero",
    )


def zimage(build: Callable[..., nn.Module] | None = None, **over: Any) -> nn.Module:
    """`build`: another class of the same arguments."""
    from comfy.ldm.lumina.model import NextDiT

    config = dict(
        patch_size=2,
        in_channels=16,
        dim=256,
        n_layers=4,
        n_refiner_layers=2,
        n_heads=8,
        n_kv_heads=8,
        multiple_of=32,
        ffn_dim_multiplier=1.0,
        qk_norm=True,
        cap_feat_dim=48,
        axes_dims=[8, 12, 12],
        axes_lens=[64, 64, 64],
        rope_theta=256.0,
        z_image_modulation=True,
        time_scale=1000.0,
        pad_tokens_multiple=8,
    )
    return (build or NextDiT)(**(config | over), **operations())


def zimage_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(context=random(b, 11, 48), num_tokens=11)


def lumina2() -> nn.Module:
    return zimage(
        n_kv_heads=2, z_image_modulation=False, time_scale=1.0, pad_tokens_multiple=None, rope_theta=10000.0
    )


def lumina2_mask(b: int, h: int, w: int) -> Call:
    args, kw = zimage_inputs(b, h, w)
    mask = torch.ones(b, 11, dtype=torch.long)
    mask[:, 8:] = 0
    return args, kw | dict(attention_mask=mask)


def sd35() -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    return OpenAISignatureMMDITWrapper(
        input_size=None,
        pos_embed_scaling_factor=None,
        pos_embed_max_size=24,
        num_patches=24 * 24,
        depth=4,
        num_blocks=4,
        in_channels=16,
        adm_in_channels=32,
        qk_norm="rms",
        x_block_self_attn_layers=[0, 1],
        context_embedder_config=dict(target="torch.nn.Linear", params=dict(in_features=48, out_features=256)),
        **operations(),
    )


def sd35_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 13, 48), y=random(b, 32)
    )


def hidream() -> nn.Module:
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_channels=[48, 40],
        text_emb_dim=32,
        axes_dims_rope=(8, 12, 12),
        max_resolution=(128, 128),
        llama_layers=[0, 1, 2, 3, 4],
        **operations(),
    )


def hidream_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(900, 500, b)), dict(
        y=random(b, 32), context=random(b, 5, 48), encoder_hidden_states_llama3=random(b, 5, 6, 40)
    )


def aura() -> nn.Module:
    from comfy.ldm.aura.mmdit import MMDiT

    return MMDiT(
        in_channels=4,
        out_channels=4,
        patch_size=2,
        dim=128,
        n_layers=4,
        n_double_layers=2,
        n_heads=4,
        cond_seq_dim=48,
        max_seq=32 * 32,
        **operations(),
    )


def aura_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 4, h, w), torch.linspace(0.9, 0.5, b)), dict(context=random(b, 9, 48))


def krea2() -> nn.Module:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=128,
        tdim=32,
        txtdim=48,
        heads=4,
        kvheads=2,
        layers=4,
        txtlayers=2,
        txtheads=4,
        txtkvheads=4,
        default_ref_method="index_timestep_zero",
        **operations(),
    )


def krea2_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 96), ref_latents=[random(b, 16, 4, 6)]
    )


def ernie() -> nn.Module:
    from comfy.ldm.ernie.model import ErnieImageModel

    return ErnieImageModel(
        hidden_size=128,
        num_attention_heads=4,
        num_layers=4,
        ffn_hidden_size=256,
        in_channels=16,
        out_channels=16,
        patch_size=1,
        text_in_dim=48,
        rope_axes_dim=(8, 12, 12),
        **operations(),
    )


def ernie_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(900, 500, b)), dict(context=random(b, 9, 48))
