"""Tiny models of sound, and inputs for them."""

from __future__ import annotations

import torch
from torch import nn

from .weights import Call, operations, random


def ace_step() -> nn.Module:
    from comfy.ldm.ace.ace_step15 import AceStepConditionGenerationModel

    # A window smaller than what a rank gets.
    return AceStepConditionGenerationModel(
        hidden_size=64,
        text_hidden_dim=48,
        num_dit_layers=4,
        num_lyric_layers=1,
        num_timbre_layers=1,
        num_tokenizer_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        sliding_window=5,
        fsq_dim=64,
        encoder_hidden_size=64,
        encoder_intermediate_size=96,
        encoder_num_heads=4,
        **operations(),
    )


def ace_step_inputs(b: int, h: int, w: int) -> Call:
    """`h` x `w` steps of sound."""
    return (random(b, 64, h * w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 7, 48),
        lyric_embed=random(b, 5, 48),
        refer_audio=random(b, 64, h * w, seed=5),
        is_covers=True,
    )


def ace_step_codes(b: int, h: int, w: int) -> Call:
    args, kw = ace_step_inputs(b, h, w)
    return args, kw | dict(audio_codes=torch.arange(-(-h * w // 5)).repeat(b, 1))
