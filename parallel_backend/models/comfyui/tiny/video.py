"""Tiny models of video families, with sound too, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .weights import Call, operations, random


def wan(**over: Any) -> nn.Module:
    from comfy.ldm.wan.model import WanModel

    return WanModel(
        **(
            dict(
                model_type="t2v",
                in_dim=16,
                dim=96,
                ffn_dim=192,
                freq_dim=32,
                text_dim=48,
                out_dim=16,
                num_heads=4,
                num_layers=4,
            )
            | over
        ),
        **operations(),
    )


def wan_inputs(b: int, h: int, w: int, frames: int = 3, **extra: Any) -> Call:
    return (random(b, 16, frames, h, w), torch.linspace(900, 500, b)), dict(context=random(b, 7, 48), **extra)


def wan_frames(b: int, h: int, w: int) -> Call:  # Wan 2.2 5B image to video: a timestep for each frame
    (x, _), kw = wan_inputs(b, h, w)
    kept = torch.ones(b, 1, 3, h, w)
    kept[:, :, :1] = 0
    return (x, torch.linspace(0, 900, 3).repeat(b, 1)), kw | dict(denoise_mask=kept)


def wan_i2v() -> nn.Module:
    return wan(model_type="i2v", in_dim=36)


def wan_i2v_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 36, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 7, 48), clip_fea=random(b, 5, 1280)
    )


def wan_vace() -> nn.Module:
    from comfy.ldm.wan.model import VaceWanModel

    return VaceWanModel(
        model_type="vace",
        in_dim=16,
        dim=96,
        ffn_dim=192,
        freq_dim=32,
        text_dim=48,
        out_dim=16,
        num_heads=4,
        num_layers=4,
        vace_layers=2,
        vace_in_dim=20,
        **operations(),
    )


def wan_vace_inputs(b: int, h: int, w: int) -> Call:
    args, kw = wan_inputs(b, h + h % 2, w + w % 2)
    x = args[0]
    return args, kw | dict(vace_context=random(b, 1, 20, *x.shape[2:], seed=6), vace_strength=[0.7])


def ltxv() -> nn.Module:
    from comfy.ldm.lightricks.model import LTXVModel

    return LTXVModel(
        in_channels=16,
        cross_attention_dim=128,
        attention_head_dim=32,
        num_attention_heads=4,
        caption_channels=48,
        num_layers=4,
        **operations(),
    )


def ltxv_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, 3, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), attention_mask=None, frame_rate=25
    )


def ltxv_tokens(b: int, h: int, w: int) -> Call:  # image to video: a timestep for each token
    (x, _), kw = ltxv_inputs(b, h, w)
    return (x, torch.rand(b, 3 * h * w, generator=torch.Generator().manual_seed(1))), kw


def ltxv_guides(b: int, h: int, w: int) -> Call:
    """Two guides of one frame each after the video, of which the first has a part that is left out."""
    (x, _), kw = ltxv_inputs(b, h, w)
    guided = torch.cat([x, random(b, 16, 2, h, w, seed=5)], 2)
    return (guided, _guided_timesteps(b, h, w)), kw | _guides(b, h, w) | dict(attention_mask=_text_mask(b))


def _text_mask(b: int) -> Tensor:
    mask = torch.ones(b, 9, dtype=torch.long)
    mask[:, :2] = 0
    return mask


def _guided_timesteps(b: int, h: int, w: int) -> Tensor:
    return torch.tensor([0.2, 0.5, 0.9, 0.0, 0.0]).repeat_interleave(h * w).repeat(b, 1)


def _guides(b: int, h: int, w: int) -> dict[str, Any]:
    kept = torch.ones(b, 1, 5, h, w)
    kept[:, :, 3:] = 0
    kept[:, :, 3, :1] = -1
    places = random(b, 3, 2 * h * w, 1, seed=6).abs() * 100
    return dict(
        denoise_mask=kept,
        keyframe_idxs=torch.cat([places, places + 8], -1),
        guide_attention_entries=[
            {"pre_filter_count": h * w, "strength": 1.0, "pixel_mask": None, "latent_shape": [1, h, w]}
        ]
        * 2,
    )


def ltxv_strengths(b: int, h: int, w: int) -> Call:
    args, kw = ltxv_guides(b, h, w)
    return args, kw | _strengths(h, w)


def _strengths(h: int, w: int) -> dict[str, Any]:
    """Of two guides: a weak one that counts less in places and not at all in others, and a strong one."""
    entry = {"pre_filter_count": h * w, "latent_shape": [1, h, w]}
    places = random(1, 1, 1, 8, 8, seed=8).abs().clamp(max=1)
    places[..., :4] = 0
    return dict(
        guide_attention_entries=[
            entry | {"strength": 0.4, "pixel_mask": places},
            entry | {"strength": 3.0, "pixel_mask": None},
        ]
    )


# LTX-2's sizes, of which ComfyUI reads most from a file's metadata.
LTX_SOUND: dict[str, Any] = dict(
    in_channels=16,
    audio_in_channels=128,
    cross_attention_dim=128,
    audio_cross_attention_dim=64,
    attention_head_dim=32,
    audio_attention_head_dim=16,
    num_attention_heads=4,
    audio_num_attention_heads=4,
    caption_channels=48,
    num_layers=4,
    connector_num_layers=1,
    connector_num_attention_heads=2,
    connector_attention_head_dim=24,
    use_middle_indices_grid=True,
)


def ltxav() -> nn.Module:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return LTXAVModel(**LTX_SOUND, **operations())


def ltxav_inputs(b: int, h: int, w: int) -> Call:
    t = torch.rand(b, 3, 1, generator=torch.Generator().manual_seed(1)).expand(b, 3, h * w).reshape(b, -1)
    return ([random(b, 16, 3, h, w), random(b, 8, 7, 16)], (t, torch.linspace(0.9, 0.5, b))), dict(
        context=random(b, 9, 96), attention_mask=None, frame_rate=25
    )


def ltxav_guides(b: int, h: int, w: int) -> Call:
    ((picture, sound), (_, of_sound)), kw = ltxav_inputs(b, h, w)
    picture = torch.cat([picture, random(b, 16, 2, h, w, seed=5)], 2)
    return ([picture, sound], (_guided_timesteps(b, h, w), of_sound)), kw | _guides(b, h, w) | dict(
        attention_mask=_text_mask(b), audio_denoise_mask=torch.ones(b, 8, 7, 16)
    )


def ltxav_strengths(b: int, h: int, w: int) -> Call:
    args, kw = ltxav_guides(b, h, w)
    return args, kw | _strengths(h, w)


def minimax(**over: Any) -> nn.Module:
    from comfy.ldm.minimax.model import MiniMaxH3Model

    return MiniMaxH3Model(
        **(
            dict(
                hidden_size=128,
                num_layers=4,
                token_refiner_num_layers=1,
                num_attention_heads=4,
                attention_head_dim=32,
                ffn_hidden_size=192,
                text_dim=48,
                timestep_input_dim=32,
                time_embed_hidden_size=64,
                time_embed_dim=32,
                rope_inv_freq_len=4,
            )
            | over
        ),
        **operations(),
    )


def minimax_inputs(b: int, h: int, w: int, **payload: Any) -> Call:
    """One row, whatever `b`: the model takes no more."""
    h, w = h + h % 2, w + w % 2
    latents = [random(1, 24, 2, h, w), random(1, 32, 2, 5)]
    return (latents, torch.tensor([600.0])), dict(
        context=random(1, 9, 48), minimax_payload={"seed": 3, **payload}
    )


def minimax_keyframes(b: int, h: int, w: int) -> Call:
    """A first frame, and text of which a part stands for a picture."""
    h, w = h + h % 2, w + w % 2
    frame = random(1, 24, 1, h, w, seed=5)
    return minimax_inputs(
        b,
        h,
        w,
        keyframes=[{"resolved_frame_index": 0, "latent": frame}],
        frame_count=5,
        cond_video_latents=[frame],
        text_token_tags=torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1]),
    )


def minimax_references(b: int, h: int, w: int) -> Call:
    """A picture and a sound to go by."""
    picture, sound = random(1, 24, 1, 4, 6, seed=6), random(1, 32, 2, 3, seed=7)
    return minimax_inputs(
        b,
        h,
        w,
        refs=[{"kind": "image", "latent_h": 4, "latent_w": 6}, {"kind": "audio", "ref_audio_t": 3}],
        cond_video_latents=[picture],
        cond_audio_latents=[sound],
    )


def cosmos() -> nn.Module:
    from comfy.ldm.cosmos.predict2 import MiniTrainDIT

    return _cosmos(MiniTrainDIT)


def _cosmos(build: Callable[..., nn.Module]) -> nn.Module:
    return build(
        max_img_h=240,
        max_img_w=240,
        max_frames=128,
        in_channels=16,
        out_channels=16,
        patch_spatial=2,
        patch_temporal=1,
        model_channels=96,
        num_blocks=4,
        num_heads=4,
        crossattn_emb_channels=48,
        pos_emb_cls="rope3d",
        use_adaln_lora=True,
        adaln_lora_dim=32,
        extra_per_block_abs_pos_emb=False,
        **operations(),
    )


def cosmos_inputs(b: int, h: int, w: int) -> Call:
    kept = torch.ones(b, 1, 3, h, w)
    return (random(b, 16, 3, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), denoise_mask=kept, fps=16.0
    )


def anima() -> nn.Module:
    """Its adapter of text has one size only; a smaller one changes no order of tokens."""
    from comfy.ldm.anima.model import Anima, LLMAdapter

    module = _cosmos(Anima)
    module.llm_adapter = LLMAdapter(48, 48, 48, num_layers=1, num_heads=4, **operations())
    return module


def anima_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, 1, h, w), torch.linspace(0.9, 0.5, b)), dict(
        context=random(b, 9, 48), t5xxl_ids=torch.arange(7).repeat(b, 1), t5xxl_weights=torch.ones(b, 7, 1)
    )


def cogvideo(heads: int = 4, **others: int) -> nn.Module:
    """Of as many heads; those of a file have 64 values."""
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=128 // heads,
        in_channels=16,
        out_channels=16,
        time_embed_dim=64,
        text_embed_dim=48,
        num_layers=4,
        max_text_seq_length=9,
        use_rotary_positional_embeddings=True,
        **others,
        **operations(),
    )


def cogvideo_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, 3, h, w), torch.linspace(900, 500, b)), dict(context=random(b, 9, 48))


def cogvideo15() -> nn.Module:
    """Tokens of two frames, and a second embedding of numbers."""
    return cogvideo(patch_size_t=2, ofs_embed_dim=64)


def cogvideo15_inputs(b: int, h: int, w: int) -> Call:
    args, kw = cogvideo_inputs(b, h, w)
    return args, kw | dict(ofs=torch.linspace(2, 3, b))


def kandinsky5() -> nn.Module:
    from comfy.ldm.kandinsky5.model import Kandinsky5

    return Kandinsky5(
        in_text_dim=48,
        in_text_dim2=32,
        time_dim=64,
        model_dim=128,
        ff_dim=256,
        visual_embed_dim=64,
        num_visual_blocks=4,
        axes_dims=(8, 12, 12),
        **operations(),
    )


def kandinsky5_inputs(b: int, h: int, w: int) -> Call:
    return (random(b, 16, 3, h, w), torch.linspace(900, 500, b)), dict(
        context=random(b, 9, 48), y=random(b, 32)
    )


def kandinsky5_i2v(b: int, h: int, w: int) -> Call:
    """A first frame, and text with a mask."""
    args, kw = kandinsky5_inputs(b, h, w)
    return args, kw | dict(
        attention_mask=_text_mask(b), time_dim_replace=random(b, 16, 1, h + h % 2, w + w % 2, seed=5)
    )
