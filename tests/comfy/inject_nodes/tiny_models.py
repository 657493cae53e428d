"""Tiny random model files of ComfyUI's own classes.

A file has the key layout that stock loaders detect. Only sizes that detection reads from the weights can be chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import comfy.ops
import torch
from torch import Tensor, nn

_OPERATIONS = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


def flux2() -> nn.Module:
    from comfy.ldm.flux.model import Flux

    return Flux(
        in_channels=128, out_channels=128, vec_in_dim=None, context_in_dim=48, hidden_size=256, mlp_ratio=3.0,
        num_heads=2, depth=2, depth_single_blocks=2, axes_dim=[32, 32, 32, 32], theta=2000, patch_size=1,
        qkv_bias=False, ops_bias=False, guidance_embed=True, global_modulation=True, mlp_silu_act=True,
        txt_ids_dims=[3], default_ref_method="index", ref_index_scale=10.0, **_OPERATIONS,
    )  # fmt: skip


def _wan(model_class: str, model_type: str, **changes) -> nn.Module:
    import comfy.ldm.wan.model

    sizes = {
        "in_dim": 16, "dim": 256, "ffn_dim": 256, "freq_dim": 256, "text_dim": 4096, "out_dim": 16, "num_heads": 2,
        "num_layers": 2, **changes,
    }  # fmt: skip
    return getattr(comfy.ldm.wan.model, model_class)(model_type=model_type, **sizes, **_OPERATIONS)


def wan() -> nn.Module:
    return _wan("WanModel", "t2v")


def wan_causal() -> nn.Module:
    """Returns a network with the weights of `wan`; the file's metadata says that it makes one frame after another."""
    return _wan("WanModel", "t2v", num_layers=2)


def wan_talk() -> nn.Module:
    """Returns a Wan of width 640: the 40 heads of InfiniteTalk's audio attention must divide it."""
    return _wan("WanModel", "i2v", in_dim=36, dim=640, num_heads=5)


def wan_i2v() -> nn.Module:
    return _wan("WanModel", "i2v", in_dim=36)


def wan_ti2v() -> nn.Module:
    """Returns a network like the 5B model of Wan 2.2, which has a different latent space."""
    return _wan("WanModel", "t2v", in_dim=48, out_dim=48)


def wan_vace() -> nn.Module:
    return _wan("VaceWanModel", "vace", vace_layers=1, vace_in_dim=96)


def wan_camera() -> nn.Module:
    return _wan("CameraWanModel", "camera_2.2", in_dim=36)


def wan_scail() -> nn.Module:
    return _wan("SCAILWanModel", "scail", in_dim=20)


def wan_s2v() -> nn.Module:
    return _wan("WanModel_S2V", "s2v")


def hunyuan_video(**changes) -> nn.Module:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    sizes = {
        "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 48, "hidden_size": 384,
        "mlp_ratio": 4.0, "num_heads": 3, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 256,
        "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False, **changes,
    }  # fmt: skip
    return HunyuanVideo(**sizes, **_OPERATIONS)


def skyreels_i2v() -> nn.Module:
    """Returns a network like SkyReels-V1, which takes the first image as further channels of the latent."""
    return hunyuan_video(in_channels=32)


def hunyuan_video_15() -> nn.Module:
    return hunyuan_video(
        in_channels=65, out_channels=32, vec_in_dim=None, guidance_embed=False, patch_size=[1, 1, 1],
        use_cond_type_embedding=True, vision_in_dim=1152, meanflow_sum=True,
    )  # fmt: skip


def sd3() -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    context = {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 192}}
    return OpenAISignatureMMDITWrapper(
        input_size=None, pos_embed_scaling_factor=None, pos_embed_offset=None, pos_embed_max_size=24,
        num_patches=24 * 24, depth=3, num_blocks=3, in_channels=16, out_channels=16, patch_size=2, adm_in_channels=2048,
        qkv_bias=True, qk_norm="rms", x_block_self_attn_layers=[0], context_embedder_config=context, **_OPERATIONS,
    )  # fmt: skip


LTX = {"num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128,
       "caption_channels": 48, "in_channels": 128}  # fmt: skip


def ltx_video() -> nn.Module:
    from comfy.ldm.lightricks.model import LTXVModel

    return LTXVModel(**LTX, **_OPERATIONS)


LTX_SOUND = {
    "num_layers": 2, "in_channels": 128, "audio_in_channels": 128, "cross_attention_dim": 128,
    "audio_cross_attention_dim": 64, "attention_head_dim": 32, "audio_attention_head_dim": 16, "num_attention_heads": 4,
    "audio_num_attention_heads": 4, "caption_channels": 48, "connector_num_layers": 1,
    "connector_num_attention_heads": 2, "connector_attention_head_dim": 24, "use_middle_indices_grid": True,
}  # fmt: skip


def ltx_sound() -> nn.Module:
    from comfy.ldm.lightricks.av_model import LTXAVModel

    return LTXAVModel(**LTX_SOUND, **_OPERATIONS)


def cogvideo() -> nn.Module:
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=3, attention_head_dim=64, in_channels=16, out_channels=16, time_embed_dim=64,
        text_embed_dim=48, num_layers=2, use_rotary_positional_embeddings=True, **_OPERATIONS,
    )  # fmt: skip


SD15 = {
    "image_size": 32, "in_channels": 4, "model_channels": 320, "num_res_blocks": [1, 1], "channel_mult": (1, 1),
    "num_heads": 8, "use_spatial_transformer": True, "transformer_depth": [1, 0], "transformer_depth_middle": 1,
    "context_dim": 768, "use_linear_in_transformer": False, "legacy": False,
}  # fmt: skip


def unet() -> nn.Module:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(**SD15, out_channels=4, transformer_depth_output=[1, 1, 0, 0], **_OPERATIONS)


def unet_controlnet() -> nn.Module:
    from comfy.cldm.cldm import ControlNet

    return ControlNet(**SD15, hint_channels=3, **_OPERATIONS)


def sdxl() -> nn.Module:
    """Returns a UNet with the depths by which ComfyUI detects KOALA 700M, a small model of SDXL's kind. At its lowest
    resolution it is a quarter as wide."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        image_size=32, in_channels=4, model_channels=320, out_channels=4, num_res_blocks=[1, 1, 1],
        channel_mult=(1, 1, 1), num_head_channels=64, use_spatial_transformer=True, transformer_depth=[0, 2, 5],
        transformer_depth_output=[0, 0, 1, 0, 1, 0], transformer_depth_middle=1, context_dim=2048,
        use_linear_in_transformer=True, num_classes="sequential", adm_in_channels=2816, legacy=False,
        **_OPERATIONS | {"dtype": torch.bfloat16},
    )  # fmt: skip


def sound() -> nn.Module:
    from comfy.ldm.audio.dit import AudioDiffusionTransformer

    return AudioDiffusionTransformer(
        io_channels=64, embed_dim=768, cond_token_dim=768, project_cond_tokens=True, global_cond_dim=1536, depth=2,
        num_heads=24, attn_kwargs={}, timestep_features_type="learned", **_OPERATIONS,
    )  # fmt: skip


def sound_conditioner() -> nn.Module:
    """Returns the part of Stable Audio's file that encodes how long a sound is; the network does not contain it."""
    from comfy.ldm.audio.embedders import NumberConditioner

    parts = {name: NumberConditioner(768) for name in ("seconds_start", "seconds_total")}
    return nn.ModuleDict({"conditioner": nn.ModuleDict({"conditioners": nn.ModuleDict(parts)})})


def qwen_image() -> nn.Module:
    """Returns a Qwen-Image of one block: detection fixes its width, so more blocks would be too large for a test."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=64, out_channels=16, num_layers=1, attention_head_dim=128, num_attention_heads=24,
        joint_attention_dim=3584, axes_dims_rope=(16, 56, 56), **_OPERATIONS | {"dtype": torch.bfloat16},
    )  # fmt: skip


def minimax() -> nn.Module:
    from comfy.ldm.minimax.model import MiniMaxH3Model

    return MiniMaxH3Model(
        hidden_size=256, num_layers=2, token_refiner_num_layers=1, num_attention_heads=2, attention_head_dim=128,
        ffn_hidden_size=256, text_dim=48, timestep_input_dim=32, time_embed_hidden_size=64, time_embed_dim=32,
        **_OPERATIONS,
    )  # fmt: skip


def lens() -> nn.Module:
    from comfy.ldm.lens.model import LensTransformer2DModel

    return LensTransformer2DModel(
        in_channels=128, out_channels=32, num_layers=2, num_attention_heads=2, enc_hidden_dim=24,
        selected_layer_index=(0, 1), **_OPERATIONS,
    )  # fmt: skip


def joyimage() -> nn.Module:
    from comfy.ldm.joyimage.model import JoyImageTransformer3DModel

    return JoyImageTransformer3DModel(hidden_size=256, num_attention_heads=2, num_layers=2, **_OPERATIONS)


def hunyuan_3d() -> nn.Module:
    from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2

    return Hunyuan3Dv2(
        context_in_dim=48, hidden_size=256, depth=1, depth_single_blocks=2, qkv_bias=True, **_OPERATIONS
    )


# name: (module, prefix of the keys, config in the metadata)
FILES: dict[str, tuple[Callable[[], nn.Module], str, dict | None]] = {
    "flux2": (flux2, "", None),
    "wan_t2v": (wan, "", None),
    "wan_i2v": (wan_i2v, "", None),
    "wan_causal": (wan_causal, "", {"transformer": {"causal_ar": True}}),
    "wan_talk": (wan_talk, "", None),
    "wan_ti2v": (wan_ti2v, "", None),
    "wan_vace": (wan_vace, "", None),
    "wan_fp8": (wan, "", None),
    "wan_camera": (wan_camera, "", None),
    "wan_scail": (wan_scail, "", None),
    "wan_s2v": (wan_s2v, "", None),
    "lens": (lens, "", None),
    "joyimage": (joyimage, "", None),
    "hunyuan_3d": (hunyuan_3d, "", None),
    "hunyuan_video": (hunyuan_video, "", None),
    "hunyuan_video_15": (hunyuan_video_15, "", None),
    "skyreels_i2v": (skyreels_i2v, "", None),
    "sd3": (sd3, "model.diffusion_model.", None),
    "ltx_video": (ltx_video, "", {"transformer": LTX}),
    "ltx_sound": (ltx_sound, "", {"transformer": LTX_SOUND}),
    "cogvideo": (cogvideo, "", None),
    "unet": (unet, "model.diffusion_model.", None),
    "unet_controlnet": (unet_controlnet, "", None),
    "sdxl": (sdxl, "model.diffusion_model.", None),
    "sound": (sound, "model.diffusion_model.", None),
    "qwen_image": (qwen_image, "", None),
    "minimax": (minimax, "", None),
}


def drawn(module: nn.Module, seed: int = 7) -> dict[str, Tensor]:
    """Returns random weights that keep the variance of the input, so that every input matters and nothing overflows."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in module.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            found[name] = noise * 0.8 / max(1, tensor[0].numel()) ** 0.5
        elif "norm" in name and name.endswith(("weight", "scale", "gamma")):
            found[name] = 1 + 0.2 * noise
        else:
            found[name] = 0.2 * noise
    return found


def in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors` with the blocks' matrices in fp8, a scale for each, as in ComfyUI's quantised files."""
    found = dict(tensors)
    layer_format = torch.tensor(list(json.dumps({"format": "float8_e4m3fn"}).encode()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        if name.startswith("blocks.") and name.endswith(".weight") and tensor.ndim == 2:
            layer = name.removesuffix(".weight")
            scale = tensor.abs().max() / 448
            found[name] = (tensor / scale).to(torch.float8_e4m3fn)
            found[f"{layer}.weight_scale"] = scale
            found[f"{layer}.comfy_quant"] = layer_format.clone()
    return found


def tensors_of(kind: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns (tensors, metadata) of the file of this kind."""
    build, prefix, config = FILES[kind]
    module = build()
    dtype = next(module.parameters()).dtype
    tensors = {prefix + name: tensor.to(dtype) for name, tensor in drawn(module).items()}
    if kind == "sound":
        tensors |= drawn(sound_conditioner())
    if kind == "wan_fp8":
        tensors = in_fp8(tensors)
    return tensors, {} if config is None else {"config": json.dumps(config)}
