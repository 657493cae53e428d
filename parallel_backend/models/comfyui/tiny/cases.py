"""Each class of the table as tiny models with calls: every kind of call with which its tokens may stay apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import torch
from torch import nn

from ..model import ComfyUIModel
from . import flux_like, image, omni_like, pixels, shapes, sound, unet, video, wan_like
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
        "wan2.1 + frames beside (phantom)": (video.wan, wan_like.wan_beside),
        "wan2.1 fun + reference": (wan_like.wan_fun, wan_like.wan_fun_inputs),
        "wan2.2 + pictures in context": (video.wan, wan_like.wan_streams),
    },
    "CameraWanModel": {"wan fun camera": (wan_like.camera, wan_like.camera_inputs)},
    "SCAILWanModel": {"scail": (wan_like.scail, wan_like.scail_inputs)},
    "SCAIL2WanModel": {"scail 2": (wan_like.scail2, wan_like.scail2_inputs)},
    "AnimateWanModel": {
        "wan2.2 animate, pose": (wan_like.animate, wan_like.animate_pose),
        "wan2.2 animate, face": (wan_like.animate, wan_like.animate_face),
    },
    "WanModel_S2V": {
        "wan2.2 s2v, silent": (wan_like.s2v, wan_like.s2v_inputs),
        "wan2.2 s2v": (wan_like.s2v, wan_like.s2v_sound),
    },
    "WanDancerModel": {
        "wan dancer, silent": (wan_like.dancer, wan_like.dancer_inputs),
        "wan dancer, 24 fps": (wan_like.dancer, wan_like.dancer_slow),
        "wan dancer": (wan_like.dancer, wan_like.dancer_music),
    },
    "HumoWanModel": {"humo": (wan_like.humo, wan_like.humo_inputs)},
    "VaceWanModel": {"wan2.1 vace": (video.wan_vace, video.wan_vace_inputs)},
    "NextDiT": {
        "z-image": (image.zimage, image.zimage_inputs),
        "lumina2 (grouped kv)": (image.lumina2, image.zimage_inputs),
        "lumina2 + text mask": (image.lumina2, image.lumina2_mask),
    },
    "OpenAISignatureMMDITWrapper": {"sd3.5 medium": (image.sd35, image.sd35_inputs)},
    "LTXVModel": {
        "ltx-video": (video.ltxv, video.ltxv_inputs),
        "ltx t per token": (video.ltxv, video.ltxv_tokens),
        "ltx, 2 guides": (video.ltxv, video.ltxv_guides),
        "ltx, guides of strengths": (video.ltxv, video.ltxv_strengths),
    },
    "LTXAVModel": {
        "ltx-2 (video + sound)": (video.ltxav, video.ltxav_inputs),
        "ltx-2, 2 guides": (video.ltxav, video.ltxav_guides),
        "ltx-2, guides of strengths": (video.ltxav, video.ltxav_strengths),
    },
    "MiniMaxH3Model": {
        "minimax-h3": (video.minimax, video.minimax_inputs),
        "minimax-h3, first frame": (video.minimax, video.minimax_keyframes),
        "minimax-h3, references": (video.minimax, video.minimax_references),
    },
    "MiniTrainDIT": {"cosmos predict2": (video.cosmos, video.cosmos_inputs)},
    "HiDreamImageTransformer2DModel": {"hidream": (image.hidream, image.hidream_inputs)},
    "CogVideoXTransformer3DModel": {
        "cogvideox": (video.cogvideo, video.cogvideo_inputs),
        "cogvideox 1.5 i2v": (video.cogvideo15, video.cogvideo15_inputs),
    },
    "Kandinsky5": {
        "kandinsky5": (video.kandinsky5, video.kandinsky5_inputs),
        "kandinsky5 i2v": (video.kandinsky5, video.kandinsky5_i2v),
    },
    "MMDiT": {"auraflow": (image.aura, image.aura_inputs)},
    "SingleStreamDiT": {"krea2 + reference, gqa": (image.krea2, image.krea2_inputs)},
    "ErnieImageModel": {"ernie-image": (image.ernie, image.ernie_inputs)},
    "Anima": {"anima": (video.anima, video.anima_inputs)},
    "MageFlowTransformer2DModel": {
        "mage-flow + reference": (omni_like.mage_flow, omni_like.mage_flow_plain),
        "mage-flow + reference, text mask": (omni_like.mage_flow, omni_like.mage_flow_inputs),
    },
    "LensTransformer2DModel": {"lens": (omni_like.lens, omni_like.lens_inputs)},
    "OmniGen2Transformer2DModel": {
        "omnigen2": (omni_like.omnigen2, omni_like.omnigen2_inputs),
        "omnigen2, 2 refs": (omni_like.omnigen2, omni_like.omnigen2_edit),
    },
    "BooguTransformer2DModel": {
        "boogu": (omni_like.boogu, omni_like.omnigen2_inputs),
        "boogu, 2 refs": (omni_like.boogu, omni_like.omnigen2_edit),
    },
    "Ideogram4Transformer2DModel": {
        "ideogram 4 + text mask": (omni_like.ideogram4, omni_like.ideogram4_inputs),
        "ideogram 4, no text": (omni_like.ideogram4, omni_like.ideogram4_image),
    },
    "JoyImageTransformer3DModel": {"joyimage + reference": (omni_like.joyimage, omni_like.joyimage_inputs)},
    "PixArtMS": {"pixart": (omni_like.pixart, omni_like.pixart_inputs)},
    "ChromaRadiance": {"chroma radiance": (pixels.chroma_radiance, pixels.chroma_radiance_inputs)},
    "NextDiTPixelSpace": {"z-image on pixels": (pixels.zimage_pixels, pixels.zimage_pixels_inputs)},
    "PixDiT_T2I": {"pixeldit": (pixels.pixeldit, pixels.pixeldit_inputs)},
    "PidNet": {"pid": (pixels.pid, pixels.pid_inputs)},
    "AceStepConditionGenerationModel": {
        "ace-step 1.5": (sound.ace_step, sound.ace_step_inputs),
        "ace-step 1.5, codes": (sound.ace_step, sound.ace_step_codes),
    },
    "Hunyuan3Dv2": {"hunyuan 3d 2": (shapes.hunyuan3d, shapes.hunyuan3d_inputs)},
    "HunYuanDiTPlain": {"hunyuan 3d 2.1": (shapes.hunyuan3d_21, shapes.hunyuan3d_21_inputs)},
    "LatentSeqMMFlowModel": {"triposplat": (shapes.triposplat, shapes.triposplat_inputs)},
    "HunYuanDiT": {"hunyuan-dit": (omni_like.hunyuan_dit, omni_like.hunyuan_dit_inputs)},
    "UNetModel": {
        "sdxl + controlnet": (unet.sdxl, unet.sdxl_controlnet),
        "sdxl": (unet.sdxl, unet.sdxl_inputs),
        "sdxl refiner": (unet.refiner, unet.sdxl_inputs),
        "sd1.5": (unet.sd15, unet.sd15_inputs),
        "sd2 inpainting": (unet.sd2_inpainting, unet.sd2_inpainting_inputs),
        "sd 4x upscaler": (unet.upscaler, unet.upscaler_inputs),
        "svd": (unet.svd, unet.svd_inputs),
    },
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
        super().__init__(patcher, cpu, 0, "float32", {}, None)
