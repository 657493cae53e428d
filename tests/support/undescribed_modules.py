"""Tiny models of classes whose blocks the pack does not describe, with call inputs (rows, height, width in cells)."""

from __future__ import annotations

import torch

from parallel_backend.models.comfyui.tiny.cases import tiny_builder, tiny_inputs
from parallel_backend.models.comfyui.tiny.weights import operations, random


def _times(batch):
    return torch.linspace(0.9, 0.5, batch)


def mochi():
    from comfy.ldm.genmo.joint_model.asymm_models_joint import AsymmDiTJoint

    return AsymmDiTJoint(
        depth=2,
        patch_size=2,
        num_heads=4,
        hidden_size_x=64,
        hidden_size_y=48,
        in_channels=12,
        t5_feat_dim=64,
        t5_token_length=9,
        use_t5=True,
        mlp_ratio_x=192.0,  # the model asserts this width
        mlp_ratio_y=4.0,
        learn_sigma=False,
        qk_norm=True,
        qkv_bias=False,
        out_bias=True,
        **operations(),
    )


def mochi_inputs(b, h, w):
    mask = torch.ones(b, 9)
    mask[:, 6:] = 0  # padding, which the model crops inside attention
    return (random(b, 12, 3, h, w), _times(b)), {
        "context": random(b, 9, 64),
        "attention_mask": mask,
        "num_tokens": 6,
    }


def cosmos1():
    from comfy.ldm.cosmos.model import GeneralDIT

    return GeneralDIT(
        max_img_h=16,
        max_img_w=16,
        max_frames=8,
        in_channels=4,
        out_channels=4,
        patch_spatial=2,
        patch_temporal=1,
        model_channels=64,
        num_blocks=2,
        num_heads=4,
        crossattn_emb_channels=48,
        pos_emb_cls="rope3d",
        block_x_format="THWBD",
        affline_emb_norm=True,
        use_adaln_lora=True,
        adaln_lora_dim=16,
        extra_per_block_abs_pos_emb=True,
        extra_per_block_abs_pos_emb_type="learnable",
        **operations(),
    )


def cosmos1_inputs(b, h, w):
    return (random(b, 4, 3, h, w), _times(b)), {
        "context": random(b, 7, 48),
        "fps": 24.0,
        "image_size": torch.tensor([[8.0 * h, 8.0 * w]]).repeat(b, 1),
        "padding_mask": torch.zeros(b, 1, 8 * h, 8 * w),
    }


def stable_audio():
    from comfy.ldm.audio.dit import AudioDiffusionTransformer

    return AudioDiffusionTransformer(
        io_channels=8,
        embed_dim=128,
        cond_token_dim=64,
        global_cond_dim=32,
        depth=2,
        num_heads=2,
        **operations(),
    )


def stable_audio_inputs(b, h, w):
    return (random(b, 8, h * w), _times(b)), {"context": random(b, 7, 64), "global_embed": random(b, 32)}


def hidream_o1():
    from comfy.ldm.hidream_o1.model import HiDreamO1Transformer

    text = {
        "vocab_size": 151700,
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    vision = {
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 32,
        "depth": 1,
        "num_position_embeddings": 16,
    }
    return HiDreamO1Transformer(text_config_overrides=text, vision_config_overrides=vision, **operations())


def hidream_o1_inputs(b, h, w):
    """Returns (args, kwargs) of a call. A cell is a patch of 32 x 32 pixels."""
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds

    pixels = random(b, 3, 32 * h, 32 * w)
    tokens = torch.tensor([[5, 9, 77, 31, 151673]])  # the last one stands for the timestep
    return (pixels, 1000 * _times(b)), build_extra_conds(tokens, pixels)


def cascade_c():
    from comfy.ldm.cascade.stage_c import StageC

    return StageC(
        c_in=4,
        c_out=4,
        c_r=16,
        patch_size=1,
        c_cond=32,
        c_hidden=[32, 32],
        nhead=[2, 2],
        blocks=[[1, 1], [1, 1]],
        block_repeat=[[1, 1], [1, 1]],
        level_config=["CTA", "CTA"],
        c_clip_text=24,
        c_clip_text_pooled=24,
        c_clip_img=24,
        kernel_size=3,
        **operations(),
    )


def cascade_c_inputs(b, h, w):
    return (random(b, 4, h, w), _times(b)), {
        "clip_text": random(b, 7, 24),
        "clip_text_pooled": random(b, 1, 24),
        "clip_img": random(b, 1, 24),
    }


UNDESCRIBED = {
    "sdxl + controlnet": (tiny_builder("sdxl"), tiny_inputs("sdxl + controlnet")),
    "sd1.5": (tiny_builder("sd1.5"), tiny_inputs("sd1.5")),
    "mochi, padded text": (mochi, mochi_inputs),
    "cosmos 1": (cosmos1, cosmos1_inputs),
    "stable audio": (stable_audio, stable_audio_inputs),
    "hidream o1": (hidream_o1, hidream_o1_inputs),
    "stable cascade": (cascade_c, cascade_c_inputs),
}
