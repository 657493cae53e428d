"""Tiny random model files of ComfyUI's own classes.

A file has the key layout that stock loaders detect. Only sizes that detection reads from the weights can be chosen.
"""

from __future__ import annotations

import json
from importlib import import_module

import comfy.ops
import torch
from comfy.ldm.audio.embedders import NumberConditioner
from torch import Tensor, nn

_OPERATIONS = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


_WAN = {
    "model_type": "t2v", "in_dim": 16, "dim": 256, "ffn_dim": 256, "freq_dim": 256, "text_dim": 4096, "out_dim": 16,
    "num_heads": 2, "num_layers": 2,
}  # fmt: skip
_HUNYUAN_VIDEO = {
    "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 48, "hidden_size": 384,
    "mlp_ratio": 4.0, "num_heads": 3, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 256,
    "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
_LTX = {
    "num_layers": 2, "attention_head_dim": 32, "num_attention_heads": 4, "cross_attention_dim": 128,
    "caption_channels": 48, "in_channels": 128,
}  # fmt: skip
_LTX_SOUND = {
    "num_layers": 2, "in_channels": 128, "audio_in_channels": 128, "cross_attention_dim": 128,
    "audio_cross_attention_dim": 64, "attention_head_dim": 32, "audio_attention_head_dim": 16, "num_attention_heads": 4,
    "audio_num_attention_heads": 4, "caption_channels": 48, "connector_num_layers": 1,
    "connector_num_attention_heads": 2, "connector_attention_head_dim": 24, "use_middle_indices_grid": True,
}  # fmt: skip
_SD15 = {
    "image_size": 32, "in_channels": 4, "model_channels": 320, "num_res_blocks": [1, 1], "channel_mult": (1, 1),
    "num_heads": 8, "use_spatial_transformer": True, "transformer_depth": [1, 0], "transformer_depth_middle": 1,
    "context_dim": 768, "use_linear_in_transformer": False, "legacy": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict]] = {  # {kind: (class in the package comfy, its arguments)}
    "flux2": ("ldm.flux.model.Flux", {
        "in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 48, "hidden_size": 256,
        "mlp_ratio": 3.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [32, 32, 32, 32],
        "theta": 2000, "patch_size": 1, "qkv_bias": False, "ops_bias": False, "guidance_embed": True,
        "global_modulation": True, "mlp_silu_act": True, "txt_ids_dims": [3], "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }),
    "wan_t2v": ("ldm.wan.model.WanModel", _WAN),
    "wan_fp8": ("ldm.wan.model.WanModel", _WAN),
    "wan_causal": ("ldm.wan.model.WanModel", _WAN),  # the file's metadata says that it makes one frame after another
    "wan_i2v": ("ldm.wan.model.WanModel", _WAN | {"model_type": "i2v", "in_dim": 36}),
    # The 40 heads of InfiniteTalk's audio attention must divide the width.
    "wan_talk": ("ldm.wan.model.WanModel", _WAN | {"model_type": "i2v", "in_dim": 36, "dim": 640, "num_heads": 5}),
    # The 5B model of Wan 2.2 has a different latent space.
    "wan_ti2v": ("ldm.wan.model.WanModel", _WAN | {"in_dim": 48, "out_dim": 48}),
    "wan_vace": ("ldm.wan.model.VaceWanModel", _WAN | {"model_type": "vace", "vace_layers": 1, "vace_in_dim": 96}),
    "wan_camera": ("ldm.wan.model.CameraWanModel", _WAN | {"model_type": "camera_2.2", "in_dim": 36}),
    "wan_scail": ("ldm.wan.model.SCAILWanModel", _WAN | {"model_type": "scail", "in_dim": 20}),
    "wan_s2v": ("ldm.wan.model.WanModel_S2V", _WAN | {"model_type": "s2v"}),
    "hunyuan_video": ("ldm.hunyuan_video.model.HunyuanVideo", _HUNYUAN_VIDEO),
    # SkyReels-V1 takes the first image as further channels of the latent.
    "skyreels_i2v": ("ldm.hunyuan_video.model.HunyuanVideo", _HUNYUAN_VIDEO | {"in_channels": 32}),
    "hunyuan_video_15": ("ldm.hunyuan_video.model.HunyuanVideo", _HUNYUAN_VIDEO | {
        "in_channels": 65, "out_channels": 32, "vec_in_dim": None, "guidance_embed": False, "patch_size": [1, 1, 1],
        "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
    }),
    "sd3": ("ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper", {
        "input_size": None, "pos_embed_scaling_factor": None, "pos_embed_offset": None, "pos_embed_max_size": 24,
        "num_patches": 24 * 24, "depth": 3, "num_blocks": 3, "in_channels": 16, "out_channels": 16, "patch_size": 2,
        "adm_in_channels": 2048, "qkv_bias": True, "qk_norm": "rms", "x_block_self_attn_layers": [0],
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 192}},
    }),
    "ltx_video": ("ldm.lightricks.model.LTXVModel", _LTX),
    "ltx_sound": ("ldm.lightricks.av_model.LTXAVModel", _LTX_SOUND),
    "cogvideo": ("ldm.cogvideo.model.CogVideoXTransformer3DModel", {
        "num_attention_heads": 3, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16,
        "time_embed_dim": 64, "text_embed_dim": 48, "num_layers": 2, "use_rotary_positional_embeddings": True,
    }),
    "unet": ("ldm.modules.diffusionmodules.openaimodel.UNetModel", _SD15 | {
        "out_channels": 4, "transformer_depth_output": [1, 1, 0, 0],
    }),
    # The depths by which ComfyUI detects KOALA 700M, a small model of SDXL's kind; a quarter as wide at its lowest
    # resolution.
    "sdxl": ("ldm.modules.diffusionmodules.openaimodel.UNetModel", {
        "image_size": 32, "in_channels": 4, "model_channels": 320, "out_channels": 4, "num_res_blocks": [1, 1, 1],
        "channel_mult": (1, 1, 1), "num_head_channels": 64, "use_spatial_transformer": True,
        "transformer_depth": [0, 2, 5], "transformer_depth_output": [0, 0, 1, 0, 1, 0], "transformer_depth_middle": 1,
        "context_dim": 2048, "use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 2816,
        "legacy": False, "dtype": torch.bfloat16,
    }),
    "unet_controlnet": ("cldm.cldm.ControlNet", _SD15 | {"hint_channels": 3}),
    "sound": ("ldm.audio.dit.AudioDiffusionTransformer", {
        "io_channels": 64, "embed_dim": 768, "cond_token_dim": 768, "project_cond_tokens": True,
        "global_cond_dim": 1536, "depth": 2, "num_heads": 24, "attn_kwargs": {}, "timestep_features_type": "learned",
    }),
    # Detection fixes the width of Qwen-Image, so more blocks would be too large for a test.
    "qwen_image": ("ldm.qwen_image.model.QwenImageTransformer2DModel", {
        "in_channels": 64, "out_channels": 16, "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24,
        "joint_attention_dim": 3584, "axes_dims_rope": (16, 56, 56), "dtype": torch.bfloat16,
    }),
    "minimax": ("ldm.minimax.model.MiniMaxH3Model", {
        "hidden_size": 256, "num_layers": 2, "token_refiner_num_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 128, "ffn_hidden_size": 256, "text_dim": 48, "timestep_input_dim": 32,
        "time_embed_hidden_size": 64, "time_embed_dim": 32,
    }),
    "lens": ("ldm.lens.model.LensTransformer2DModel", {
        "in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 2, "enc_hidden_dim": 24,
        "selected_layer_index": (0, 1),
    }),
    "joyimage": ("ldm.joyimage.model.JoyImageTransformer3DModel", {
        "hidden_size": 256, "num_attention_heads": 2, "num_layers": 2,
    }),
    "hunyuan_3d": ("ldm.hunyuan3d.model.Hunyuan3Dv2", {
        "context_in_dim": 48, "hidden_size": 256, "depth": 1, "depth_single_blocks": 2, "qkv_bias": True,
    }),
}  # fmt: skip
PREFIXED = ("sd3", "unet", "sdxl", "sound")  # whose keys begin with model.diffusion_model.
CONFIGS = {  # in the file's metadata
    "wan_causal": {"transformer": {"causal_ar": True}},
    "ltx_video": {"transformer": _LTX},
    "ltx_sound": {"transformer": _LTX_SOUND},
}


def build(kind: str) -> nn.Module:
    """Returns the network of this kind."""
    path, arguments = MODELS[kind]
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"comfy.{module}"), name)(**_OPERATIONS | arguments)


def sound_conditioner() -> nn.Module:
    """Returns the part of Stable Audio's file that encodes how long a sound is; the network does not contain it."""
    parts = {name: NumberConditioner(768) for name in ("seconds_start", "seconds_total")}
    return nn.ModuleDict({"conditioner": nn.ModuleDict({"conditioners": nn.ModuleDict(parts)})})


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
    module = build(kind)
    dtype = next(module.parameters()).dtype
    prefix = "model.diffusion_model." if kind in PREFIXED else ""
    tensors = {prefix + name: tensor.to(dtype) for name, tensor in drawn(module).items()}
    if kind == "sound":
        tensors |= drawn(sound_conditioner())
    if kind == "wan_fp8":
        tensors = in_fp8(tensors)
    return tensors, {"config": json.dumps(CONFIGS[kind])} if kind in CONFIGS else {}
