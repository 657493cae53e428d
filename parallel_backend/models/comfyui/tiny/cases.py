"""Each class of the table as tiny models with calls: every kind of call with which its tokens may stay apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import nn

from ..model import ComfyUIModel
from ..weights import ComfyUIWeights
from . import flux_like, image, video
from .weights import Call

# (build the module, inputs(batch, height, width) in latent pixels). Some inputs round odd sizes up, as ComfyUI does for
# those models before it calls them.
Inputs = Callable[[int, int, int], Call]
Case = tuple[Callable[[], nn.Module], Inputs]

CASES: Mapping[str, Mapping[str, Case]] = {  # by class, by name
    "Flux": {
        "flux1": (flux_like.flux, flux_like.flux_inputs),
        "flux1 + reference": (flux_like.flux, flux_like.flux_refs),
        "flux1 + controlnet": (flux_like.flux, flux_like.flux_control),
        "flux1 + full mask": (flux_like.flux, flux_like.flux_mask),
        "flux2 + reference": (flux_like.flux2, flux_like.flux2_inputs),
    },
    "Chroma": {"chroma": (flux_like.chroma, flux_like.chroma_inputs)},
    "HunyuanVideo": {
        "hunyuanvideo + mask": (flux_like.hunyuan, flux_like.hunyuan_inputs),
        "hunyuanvideo i2v": (flux_like.hunyuan, flux_like.hunyuan_i2v),
        "hunyuanvideo 1.5": (flux_like.hunyuan15, flux_like.hunyuan15_inputs),
    },
    "QwenImageTransformer2DModel": {
        "qwen-image": (image.qwen, image.qwen_inputs),
        "qwen-image + text mask": (image.qwen, image.qwen_mask),
        "qwen-edit, 2 refs at t=0": (image.qwen, image.qwen_edit),
    },
    "WanModel": {
        "wan2.1 t2v": (video.wan, video.wan_inputs),
        "wan2.2 t per frame": (video.wan, video.wan_frames),
        "wan2.1 i2v": (video.wan_i2v, video.wan_i2v_inputs),
    },
    "VaceWanModel": {"wan2.1 vace": (video.wan_vace, video.wan_vace_inputs)},
    "NextDiT": {
        "z-image": (image.zimage, image.zimage_inputs),
        "lumina2 (grouped kv)": (image.lumina2, image.zimage_inputs),
    },
    "OpenAISignatureMMDITWrapper": {"sd3.5 medium": (image.sd35, image.sd35_inputs)},
    "LTXVModel": {
        "ltx-video": (video.ltxv, video.ltxv_inputs),
        "ltx t per token": (video.ltxv, video.ltxv_tokens),
    },
    "LTXAVModel": {"ltx-2 (video + sound)": (video.ltxav, video.ltxav_inputs)},
    "MiniMaxH3Model": {
        "minimax-h3": (video.minimax, video.minimax_inputs),
        "minimax-h3, first frame": (video.minimax, video.minimax_keyframes),
        "minimax-h3, references": (video.minimax, video.minimax_references),
    },
    "MiniTrainDIT": {"cosmos predict2": (video.cosmos, video.cosmos_inputs)},
    "HiDreamImageTransformer2DModel": {"hidream": (image.hidream, image.hidream_inputs)},
    "CogVideoXTransformer3DModel": {"cogvideox": (video.cogvideo, video.cogvideo_inputs)},
    "Kandinsky5": {"kandinsky5": (video.kandinsky5, video.kandinsky5_inputs)},
    "MMDiT": {"auraflow": (image.aura, image.aura_inputs)},
    "SingleStreamDiT": {"krea2 + reference, gqa": (image.krea2, image.krea2_inputs)},
    "ErnieImageModel": {"ernie-image": (image.ernie, image.ernie_inputs)},
}


class TinyModel(ComfyUIModel):
    """A module that came from no file, whole on one rank of the CPU."""

    def __init__(self, module: nn.Module) -> None:
        cpu = torch.device("cpu")
        # What is asked of ComfyUI's patcher where nobody changes weights.
        base = SimpleNamespace(
            diffusion_model=module, manual_cast_dtype=None, get_dtype=lambda: torch.float32
        )
        patcher = SimpleNamespace(model=base, load_device=cpu)
        super().__init__(patcher, cpu, 0, "float32", ComfyUIWeights(patcher, {}), None)
