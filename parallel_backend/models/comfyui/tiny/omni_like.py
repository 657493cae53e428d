"""Tiny models of OmniGen 2 and of families that take text and images in one sequence, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .weights import Call, operations, random

_OMNIGEN = dict(
    hidden_size=96,
    num_layers=3,
    num_refiner_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    multiple_of=32,
    axes_dim_rope=(8, 8, 8),
    axes_lens=(64, 64, 64),
)


def omnigen2() -> nn.Module:
    from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel

    return OmniGen2Transformer2DModel(text_feat_dim=48, **_OMNIGEN, **operations())


def boogu() -> nn.Module:
    from comfy.ldm.boogu.model import BooguTransformer2DModel

    sizes: dict[str, Any] = _OMNIGEN | dict(num_double_stream_layers=2, instruction_feat_dim=48)
    return BooguTransformer2DModel(**sizes, **operations())


def omnigen2_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(context=random(b, 9, 48), num_tokens=9)


def omnigen2_edit(b: int, h: int, w: int) -> Call:
    args, kw = omnigen2_inputs(b, h, w)
    return args, kw | dict(ref_latents=[random(b, 16, 6, 4, seed=5), random(b, 16, 4, 4, seed=6)])


def mage_flow() -> nn.Module:
    from comfy.ldm.mage_flow.model import MageFlowTransformer2DModel

    return MageFlowTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=(8, 12, 12),
        **operations(),
    )


def mage_flow_inputs(b: int, h: int, w: int) -> Call:
    mask = torch.ones(b, 9, dtype=torch.long)
    mask[:, 7:] = 0
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), attention_mask=mask, ref_latents=[random(b, 16, 3, 4, seed=5)]
    )


def mage_flow_plain(b: int, h: int, w: int) -> Call:
    args, kw = mage_flow_inputs(b, h, w)
    return args, kw | dict(attention_mask=None)


def lens() -> nn.Module:
    from comfy.ldm.lens.model import LensTransformer2DModel

    return LensTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        enc_hidden_dim=24,
        axes_dims_rope=(8, 12, 12),
        selected_layer_index=(1, 2),
        **operations(),
    )


def lens_inputs(b: int, h: int, w: int) -> Call:
    mask = torch.ones(b, 9, dtype=torch.long)
    mask[:, 7:] = 0
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), attention_mask=mask
    )


def ideogram4() -> nn.Module:
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    return Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        intermediate_size=192,
        adaln_dim=32,
        llm_features_dim=48,
        mrope_section=(6, 5, 5),
        **operations(),
    )


def ideogram4_inputs(b: int, h: int, w: int) -> Call:
    mask = torch.ones(b, 9, dtype=torch.long)
    mask[:, 7:] = 0
    return (random(b, 16, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), attention_mask=mask
    )


def ideogram4_image(b: int, h: int, w: int) -> Call:
    """Its model of the negative prompt gets no text."""
    return ideogram4_inputs(b, h, w)[0], {}


def joyimage() -> nn.Module:
    from comfy.ldm.joyimage.model import JoyImageTransformer3DModel

    return JoyImageTransformer3DModel(
        in_channels=16,
        hidden_size=128,
        num_attention_heads=4,
        text_dim=48,
        num_layers=4,
        rope_dim_list=[8, 12, 12],
        **operations(),
    )


def joyimage_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, 1, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 9, 48), ref_latents=[random(b, 16, 1, 4, 6, seed=5)]
    )


def pixart(**over: Any) -> nn.Module:
    from comfy.ldm.pixart.pixartms import PixArtMS

    sizes: dict[str, Any] = dict(
        in_channels=4, hidden_size=96, depth=4, num_heads=4, caption_channels=48, model_max_length=9
    )
    return PixArtMS(**sizes | over, **operations())


def pixart_inputs(b: int, h: int, w: int) -> Call:
    """Even sides, as ComfyUI makes its latents, and not too small for its positions."""
    h, w = 32 + h + h % 2, 32 + w + w % 2
    return (random(b, 4, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 9, 48), c_size=torch.tensor([[512.0, 512.0]]).repeat(b, 1), c_ar=torch.ones(b, 1)
    )


def hunyuan_dit() -> nn.Module:
    from comfy.ldm.hydit.models import HunYuanDiT

    return HunYuanDiT(
        hidden_size=128,
        depth=6,
        num_heads=4,
        text_states_dim=48,
        text_states_dim_t5=32,
        text_len=6,
        text_len_t5=5,
        size_cond=True,
        use_style_cond=True,
        **operations(),
    )


def hunyuan_dit_inputs(b: int, h: int, w: int) -> Call:
    mask, mask_t5 = torch.ones(b, 6), torch.ones(b, 5)
    mask[:, 4:], mask_t5[:, 3:] = 0, 0
    return (random(b, 4, h + h % 2, w + w % 2), torch.linspace(900, 500, b)), dict(
        context=random(b, 6, 48),
        text_embedding_mask=mask,
        encoder_hidden_states_t5=random(b, 5, 32),
        text_embedding_mask_t5=mask_t5,
        image_meta_size=torch.full((b, 6), 512.0),
    )
