"""Tiny random model files of ComfyUI's own classes, with the keys by which its stock loaders detect them.

Only sizes that detection reads from the weights can be chosen.
"""

from __future__ import annotations

import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui.tiny.cases import build_tiny, config_of
from parallel_backend.models.comfyui.tiny.weights import fill, operations

_WAN = {"dim": 256, "ffn_dim": 256, "freq_dim": 256, "text_dim": 4096, "num_heads": 2, "num_layers": 2}
_HUNYUAN = {
    "hidden_size": 384, "num_heads": 3, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56],
}  # fmt: skip
_LTX = {"in_channels": 128, "num_layers": 2}
_SD15 = {
    "model_channels": 320, "channel_mult": (1, 1), "num_heads": 8, "transformer_depth": [1, 0],
    "transformer_depth_output": [1, 1, 0, 0], "context_dim": 768,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # {kind: (its name in cases.json, changes of its configuration)}
    "flux2": ("flux2", {
        "in_channels": 128, "out_channels": 128, "hidden_size": 256, "num_heads": 2, "depth": 2,
        "depth_single_blocks": 2, "axes_dim": [32, 32, 32, 32],
    }),
    "wan_t2v": ("wan", _WAN),
    "wan_fp8": ("wan", _WAN),
    "wan_causal": ("wan", _WAN),  # the file's metadata says that it makes one frame after another
    "wan_i2v": ("wan i2v", _WAN),
    # The 40 heads of InfiniteTalk's audio attention must divide the width.
    "wan_talk": ("wan i2v", _WAN | {"dim": 640, "num_heads": 5}),
    # The 5B model of Wan 2.2 has a different latent space.
    "wan_ti2v": ("wan", _WAN | {"in_dim": 48, "out_dim": 48}),
    "wan_vace": ("vace", _WAN | {"vace_layers": 1, "vace_in_dim": 96}),
    "wan_camera": ("camera", _WAN | {"model_type": "camera_2.2", "in_dim": 36, "in_dim_control_adapter": 24}),
    "wan_scail": ("scail", _WAN),
    "wan_s2v": ("s2v", _WAN | {
        "audio_dim": 1024, "num_audio_token": 4, "audio_inject_layers": [0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39],
    }),
    "hunyuan_video": ("hunyuan", _HUNYUAN | {"vec_in_dim": 768}),
    # SkyReels-V1 takes the first image as further channels of the latent.
    "skyreels_i2v": ("hunyuan", _HUNYUAN | {"vec_in_dim": 768, "in_channels": 32}),
    "hunyuan_video_15": ("hunyuan 1.5", _HUNYUAN | {
        "in_channels": 65, "out_channels": 32, "vision_in_dim": 1152, "byt5": False, "meanflow_sum": True,
    }),
    "sd3": ("sd3.5", {
        "depth": 3, "num_blocks": 3, "adm_in_channels": 2048, "x_block_self_attn_layers": [0],
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 192}},
    }),
    "ltx_video": ("ltx", _LTX),
    "ltx_sound": ("ltx-2", _LTX),
    "cogvideo": ("cogvideo", {
        "num_attention_heads": 3, "attention_head_dim": 64, "num_layers": 2, "max_text_seq_length": 226,
    }),
    "unet": ("sd1.5", _SD15),
    # The depths by which ComfyUI detects KOALA 700M, a small model of SDXL's kind; a quarter as wide at its lowest
    # resolution.
    "sdxl": ("sdxl", {
        "model_channels": 320, "num_res_blocks": [1, 1, 1], "channel_mult": (1, 1, 1), "num_head_channels": 64,
        "transformer_depth": [0, 2, 5], "transformer_depth_output": [0, 0, 1, 0, 1, 0], "transformer_depth_middle": 1,
        "context_dim": 2048, "adm_in_channels": 2816,
    }),
    # Detection fixes the width of Qwen-Image, so more blocks would be too large for a test.
    "qwen_image": ("qwen", {
        "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    }),
    "minimax": ("minimax", {}),
    "lens": ("lens", {
        "in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 64,
        "axes_dims_rope": (8, 28, 28), "selected_layer_index": (0, 1),
    }),
    "joyimage": ("joyimage", {
        "hidden_size": 256, "num_attention_heads": 2, "num_layers": 2, "text_dim": 4096, "rope_dim_list": [16, 56, 56],
    }),
    "hunyuan_3d": ("hunyuan 3d 2", {
        "in_channels": 64, "hidden_size": 256, "num_heads": 16, "depth": 1, "depth_single_blocks": 2,
        "guidance_embed": False,
    }),
}  # fmt: skip
_SOUND = {"embed_dim": 768, "project_cond_tokens": True, "depth": 2, "attn_kwargs": {}}
CHECKPOINTS = ("sd3", "unet", "sdxl", "sound")  # whose keys begin with model.diffusion_model.
_IN_HALF = ("sdxl", "qwen_image")  # large ones


def write_tiny(path: Path, kind: str) -> None:
    """Writes the file of this kind unless it exists."""
    if path.exists():
        return
    import_comfyui_here()
    dtype = torch.bfloat16 if kind in _IN_HALF else torch.float32
    prefix = "model.diffusion_model." if kind in CHECKPOINTS else ""
    found = _weights(_build(kind), prefix, dtype)
    if kind == "sound":  # the part of Stable Audio's file that encodes how long a sound is
        conditioner = resolve_name("comfy.ldm.audio.embedders:NumberConditioner")
        for name in ("seconds_start", "seconds_total"):
            found |= _weights(conditioner(768), f"conditioner.conditioners.{name}.", dtype)
    if kind == "wan_fp8":
        found = _in_fp8(found)
    configs = {"wan_causal": {"causal_ar": True}}
    configs |= {name: config_of(MODELS[name][0]) | _LTX for name in ("ltx_video", "ltx_sound")}
    metadata = {"config": json.dumps({"transformer": configs[kind]})} if kind in configs else None
    save_file(found, path, metadata)


def _build(kind: str) -> nn.Module:
    if kind == "sound":
        return resolve_name("comfy.ldm.audio.dit:AudioDiffusionTransformer")(**_SOUND, **operations())
    if kind == "unet_controlnet":
        config = config_of("sd1.5") | _SD15 | {"hint_channels": 3}
        del config["out_channels"], config["transformer_depth_output"]
        return resolve_name("comfy.cldm.cldm:ControlNet")(**config, **operations())
    name, changes = MODELS[kind]
    return build_tiny(name, **changes)


def _weights(module: nn.Module, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    state = fill(module).state_dict()
    return {prefix + name: tensor.to(dtype, copy=True).contiguous() for name, tensor in state.items()}


def _in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
