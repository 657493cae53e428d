"""Tiny UNets of each kind: SD1.5, SD2's inpainting, the 4x upscaler, SDXL, its refiner, Stable Video Diffusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .weights import Call, operations, random


def _times(b: int) -> Tensor:
    return torch.linspace(900, 500, b)


def _unet(**config: Any) -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    usual = {
        "image_size": 32,
        "in_channels": 4,
        "model_channels": 32,
        "out_channels": 4,
        "use_spatial_transformer": True,
        "context_dim": 48,
    }
    return UNetModel(**(usual | config), **operations())


def sd15() -> nn.Module:
    return _unet(
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        num_heads=2,
        transformer_depth=[1, 1],
        transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1,
    )


def sd15_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 4, h, w), _times(b)), {"context": random(b, 7, 48)}


def sd2_inpainting() -> nn.Module:
    return _unet(
        in_channels=9,
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        num_head_channels=16,
        transformer_depth=[1, 1],
        transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1,
        use_linear_in_transformer=True,
    )


def sd2_inpainting_inputs(b: int, h: int, w: int) -> Call:
    """ComfyUI joins mask and picture to the latent before the call."""
    return (random(b, 9, h, w), _times(b)), {"context": random(b, 7, 48)}


def upscaler() -> nn.Module:
    """Its levels but the last attend to the prompt alone, and noise of the picture is a class."""
    return _unet(
        in_channels=7,
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        num_heads=2,
        transformer_depth=[1, 1],
        transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1,
        use_linear_in_transformer=True,
        disable_self_attentions=[True, False],
        num_classes=1000,
    )


def upscaler_inputs(b: int, h: int, w: int) -> Call:
    context = {"context": random(b, 7, 48), "y": torch.arange(b)}
    return (random(b, 7, h, w), _times(b)), context


def sdxl(**changes: Any) -> nn.Module:
    config = {
        "num_res_blocks": [2, 2, 2],
        "channel_mult": (1, 2, 4),
        "num_head_channels": 32,
        "transformer_depth": [0, 0, 1, 1, 2, 2],
        "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2],
        "transformer_depth_middle": 2,
        "use_linear_in_transformer": True,
        "num_classes": "sequential",
        "adm_in_channels": 64,
    }
    return _unet(**(config | changes))


def sdxl_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 4, h, w), _times(b)), {"context": random(b, 7, 48), "y": random(b, 64)}


def sdxl_controlnet(b: int, h: int, w: int) -> Call:
    """Residuals at each resolution, and one that is the same everywhere. Blocks take them from the lists' ends."""
    args, kwargs = sdxl_inputs(b, h, w)
    half, quarter = ((-(-h // n), -(-w // n)) for n in (2, 4))
    control = {
        "output": [None, random(b, 128, 1, 1, seed=3), random(b, 128, *quarter, seed=1)],
        "middle": [random(b, 128, *quarter, seed=2)],
        "input": [
            random(b, 64, *half, seed=5),
            random(b, 32, *half, seed=6),
            None,
            random(b, 32, h, w, seed=4),
            None,
        ],
    }
    return args, kwargs | {"control": control}


def refiner() -> nn.Module:
    return sdxl(
        num_res_blocks=[1, 1, 1, 1],
        channel_mult=(1, 1, 2, 2),
        transformer_depth=[0, 1, 1, 0],
        transformer_depth_output=[0, 0, 1, 1, 1, 1, 0, 0],
        transformer_depth_middle=1,
    )


def svd() -> nn.Module:
    return sdxl(
        in_channels=8,
        num_res_blocks=[1, 1],
        channel_mult=(1, 2),
        transformer_depth=[1, 1],
        transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1,
        use_temporal_attention=True,
        use_temporal_resblock=True,
        extra_ff_mix_layer=True,
        use_spatial_context=True,
        merge_strategy="learned_with_images",
        video_kernel_size=[3, 1, 1],
        disable_temporal_crossattention=False,
    )


def svd_inputs(b: int, h: int, w: int) -> Call:
    """`b` frames, of videos of three where they divide."""
    return (random(b, 8, h, w), _times(1).repeat(b)), {
        "context": random(b, 1, 48),
        "y": random(b, 64),
        "num_video_frames": b if b % 3 else 3,
    }
