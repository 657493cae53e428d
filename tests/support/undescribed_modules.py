"""Tiny models of classes whose blocks the pack does not describe, with call inputs (rows, height, width in cells)."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import operations, random


def _builder(path: str, config: dict[str, Any]) -> Callable[[], nn.Module]:
    """Returns a function that builds a class of ComfyUI's package ldm."""
    return lambda: resolve_name(f"comfy.ldm.{path}")(**config, **operations())


def _times(batch):
    return torch.linspace(0.9, 0.5, batch)


def _mochi(b, h, w):
    mask = torch.ones(b, 9)
    mask[:, 6:] = 0  # padding, which the model crops inside attention
    text = {"context": random(b, 9, 64), "attention_mask": mask, "num_tokens": 6}
    return (random(b, 12, 3, h, w), _times(b)), text


def _cosmos1(b, h, w):
    sizes = torch.tensor([[8.0 * h, 8.0 * w]]).repeat(b, 1)
    kwargs = {"fps": 24.0, "image_size": sizes, "padding_mask": torch.zeros(b, 1, 8 * h, 8 * w)}
    return (random(b, 4, 3, h, w), _times(b)), {"context": random(b, 7, 48), **kwargs}


def _stable_audio(b, h, w):
    return (random(b, 8, h * w), _times(b)), {"context": random(b, 7, 64), "global_embed": random(b, 32)}


def _hidream_o1(b, h, w):
    """Returns (args, kwargs) of a call. A cell is a patch of 32 x 32 pixels."""
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds

    pixels = random(b, 3, 32 * h, 32 * w)
    tokens = torch.tensor([[5, 9, 77, 31, 151673]])  # the last one stands for the timestep
    return (pixels, 1000 * _times(b)), build_extra_conds(tokens, pixels)


def _cascade_c(b, h, w):
    tokens = {"clip_text": 7, "clip_text_pooled": 1, "clip_img": 1}
    return (random(b, 4, h, w), _times(b)), {name: random(b, n, 24) for name, n in tokens.items()}


UNDESCRIBED = {
    "sdxl + controlnet": (tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet")),
    "sd1.5": (tiny_builder("sd1.5"), tiny_inputs("sd1.5")),
    "mochi, padded text": (_builder("genmo.joint_model.asymm_models_joint:AsymmDiTJoint", {
        "depth": 2, "patch_size": 2, "num_heads": 4, "hidden_size_x": 64, "hidden_size_y": 48, "in_channels": 12,
        "t5_feat_dim": 64, "t5_token_length": 9, "use_t5": True, "mlp_ratio_y": 4.0, "learn_sigma": False,
        "mlp_ratio_x": 192.0,  # the model asserts this width
        "qk_norm": True, "qkv_bias": False, "out_bias": True,
    }), _mochi),
    "cosmos 1": (_builder("cosmos.model:GeneralDIT", {
        "max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 4, "out_channels": 4, "patch_spatial": 2,
        "patch_temporal": 1, "model_channels": 64, "num_blocks": 2, "num_heads": 4, "crossattn_emb_channels": 48,
        "pos_emb_cls": "rope3d", "block_x_format": "THWBD", "affline_emb_norm": True, "use_adaln_lora": True,
        "adaln_lora_dim": 16, "extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable",
    }), _cosmos1),
    "stable audio": (_builder("audio.dit:AudioDiffusionTransformer", {
        "io_channels": 8, "embed_dim": 128, "cond_token_dim": 64, "global_cond_dim": 32, "depth": 2, "num_heads": 2,
    }), _stable_audio),
    "hidream o1": (_builder("hidream_o1.model:HiDreamO1Transformer", {
        "text_config_overrides": {
            "vocab_size": 151700, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "vision_config_overrides": {
            "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "depth": 1, "num_position_embeddings": 16,
        },
    }), _hidream_o1),
    "stable cascade": (_builder("cascade.stage_c:StageC", {
        "c_in": 4, "c_out": 4, "c_r": 16, "patch_size": 1, "c_cond": 32, "c_hidden": [32, 32], "nhead": [2, 2],
        "blocks": [[1, 1], [1, 1]], "block_repeat": [[1, 1], [1, 1]], "level_config": ["CTA", "CTA"],
        "c_clip_text": 24, "c_clip_text_pooled": 24, "c_clip_img": 24, "kernel_size": 3,
    }), _cascade_c),
}  # fmt: skip
