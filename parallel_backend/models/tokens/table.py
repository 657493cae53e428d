"""The table of ComfyUI's transformers: which arguments of their blocks are tokens, and where these may stay sharded.

UNets are split into bands of an image's rows (engine/bands/unet.py). For classes outside of the table, ranks can split
the rows of a batch and the queries of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...requests import ATTENTION, BANDS, BLOCK, ROWS, STAY
from . import block_kinds as kinds
from .regions import LAST_BLOCK, Region, Tokens


@dataclass(frozen=True)
class ModuleClass:
    """A class of the table. `source`: its file below ComfyUI's folder; `stays_with`: names of keyword arguments with
    which tokens are proven to stay sharded; with others, each block gathers its outputs; `inseparable_rows`: it
    treats rows by their position (ACE-Step 1.5 gives the first row all voices, Hunyuan3D 2.1 swaps halves); `bands`: it
    is a UNet, which ranks split into bands of rows. Pipeline stages require of several `regions` that the tokens of the
    first one are the last image tokens of the last one."""

    source: str
    regions: tuple[Region, ...]
    stays_with: frozenset[str]
    inseparable_rows: bool = False
    bands: bool = False


# Classes outside of the table whose attention cannot be split either: it is not ComfyUI's, it has small windows, or the
# class samples nothing.
WITHOUT_ATTENTION = frozenset(
    {"ACEStepTransformer2DModel", "NaDiT", "RTv4", "SAM3Model", "DepthAnything3Net"}
)

# Classes whose tokens may stay sharded, but whose blocks may not be on several devices (PipeFusion). In other classes,
# the blocks of the last region may: each takes from the one before only the outputs that the table lists, in the order
# of `lists`.
_WITHOUT_STAGES = frozenset(
    {
        "VaceWanModel",  # blocks of its two lists alternate
        "HunYuanDiT",  # blocks take skip connections from earlier ones
        "HunYuanDiTPlain",
        "HumoWanModel",  # blocks mix tokens outside of attention
        "LensTransformer2DModel",  # every call has an attention mask
        "PixDiT_T2I",  # computes pixels of all tokens after the blocks
        "NextDiTPixelSpace",
        "AceStepConditionGenerationModel",  # not proven
        "LatentSeqMMFlowModel",
    }
)

# The keys that ComfyUI's samplers put into transformer_options for every model.
_USUAL_OPTIONS = {"cond_or_uncond", "uuids", "sigmas", "sample_sigmas"}
# Options by which LTX-2's blocks leave out some of the attention that Blocks.attends lists in order, if False.
_SWITCHES = {"run_vx", "run_ax", "a2v_cross_attn", "v2a_cross_attn"}


def state_of(class_name: str) -> str:
    """Returns the first of requests.TOKEN_MODES that a class can use, which shares out the most."""
    entry = entry_of(class_name)
    if entry is None:
        return ROWS if class_name in WITHOUT_ATTENTION else ATTENTION
    if entry.bands:
        return BANDS
    return STAY if entry.stays_with else BLOCK


def has_stages(class_name: str) -> bool:
    """Returns True if the blocks of a class may be on several devices (PipeFusion)."""
    return state_of(class_name) == STAY and class_name not in _WITHOUT_STAGES


def stage_lists(class_name: str) -> tuple[str, ...]:
    """Returns the paths of the lists of blocks that may be on several devices, in order; empty if a class has none."""
    entry = entry_of(class_name) if has_stages(class_name) else None
    return () if entry is None else tuple(entry.regions[-1].lists)


def sends_tokens(class_name: str) -> bool:
    """Returns True if two ranks can send the tokens of a class instead of their queries, keys and values."""
    entry = entry_of(class_name)
    listed = entry.regions[-1].lists.values() if entry is not None and entry.regions else ()
    return bool(listed) and all(kind.projections is not None for kind in listed)


def slices_layers(class_name: str) -> bool:
    """Returns True if tensor parallelism can cut the layers of all blocks of one of ComfyUI's classes."""
    entry = TABLE.get(class_name)
    listed = [kind for region in entry.regions for kind in region.lists.values()] if entry is not None else []
    return bool(listed) and all(kind.sliced is not None for kind in listed)


def token_mode(class_name: str, kwargs: Mapping[str, Any]) -> str:
    """Returns how a call of a class can share out tokens (requests.TOKEN_MODES), by its keyword arguments alone."""
    entry = entry_of(class_name)
    if entry is None or entry.bands:
        return state_of(class_name)
    given = {name for name, value in kwargs.items() if value is not None} - {"transformer_options"}
    options = kwargs.get("transformer_options") or {}
    if any(options.get(name) is False for name in _SWITCHES):
        return ATTENTION
    is_usual = not any(_is_set(options[name]) for name in set(options) - _USUAL_OPTIONS)
    return STAY if given <= entry.stays_with and is_usual else BLOCK


def entry_of(class_name: str) -> ModuleClass | None:
    """Returns the entry of a class in TABLE or ADAPTERS, or None."""
    return TABLE.get(class_name) or ADAPTERS.get(class_name)


def _is_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    return value is not None and value is not False


def _class(
    source: str, *regions: Region, stays_with: str = "", inseparable_rows: bool = False
) -> ModuleClass:
    return ModuleClass(f"comfy/ldm/{source}", regions, frozenset(stays_with.split()), inseparable_rows)


_LTX_WITH = "context frame_rate denoise_mask keyframe_idxs guide_attention_entries attention_mask"

TABLE: Mapping[str, ModuleClass] = {
    # Not with ref_latents_method: "index_timestep_zero" looks at tokens between double and single blocks.
    "Flux": _class(
        "flux/model.py", kinds.FLUX, stays_with="context y guidance ref_latents control attention_mask"
    ),
    "Chroma": _class("chroma/model.py", kinds.FLUX, stays_with="context guidance"),
    "HunyuanVideo": _class(
        "hunyuan_video/model.py",
        kinds.FLUX,
        stays_with="context y guidance attention_mask guiding_frame_index txt_byt5 clip_fea",
    ),
    "QwenImageTransformer2DModel": _class(
        "qwen_image/model.py",
        Region({"transformer_blocks": kinds.QWEN}, "norm_out", "img"),
        stays_with="context attention_mask ref_latents ref_latents_method",
    ),
    "WanModel": _class(
        "wan/model.py",
        kinds.WAN_BLOCKS,
        stays_with="context clip_fea time_dim_concat reference_latent context_latents denoise_mask",
    ),
    "CameraWanModel": _class(
        "wan/model.py", kinds.WAN_BLOCKS, stays_with="context clip_fea camera_conditions"
    ),
    "SCAILWanModel": _class(
        "wan/model.py", kinds.WAN_BLOCKS, stays_with="context clip_fea reference_latent pose_latents"
    ),
    "SCAIL2WanModel": _class(
        "wan/model.py",
        kinds.WAN_BLOCKS,
        stays_with="context clip_fea reference_latent pose_latents ref_mask_latents sam_latents ref_mask_flag",
    ),
    # Not with arguments for faces, sound or music: code between blocks reads them.
    "AnimateWanModel": _class(
        "wan/model_animate.py", kinds.WAN_BLOCKS, stays_with="context clip_fea pose_latents"
    ),
    "WanModel_S2V": _class(
        "wan/model.py", kinds.WAN_BLOCKS, stays_with="context reference_latent control_video reference_motion"
    ),
    "WanDancerModel": _class(  # has two heads and chooses by frame rate
        "wan/model_wandancer.py",
        Region({"blocks": kinds.WAN}, LAST_BLOCK),
        stays_with="context clip_fea clip_fea_ref fps audio_inject_scale",
    ),
    "HumoWanModel": _class(
        "wan/model.py",
        Region({"blocks": kinds.HUMO}, "head", "x"),
        stays_with="context reference_latent audio_embed",
    ),
    "VaceWanModel": _class(
        "wan/model.py",
        Region({"blocks": kinds.WAN, "vace_blocks": kinds.WAN_VACE}, "head", "x"),
        stays_with="context vace_context vace_strength",
    ),
    "NextDiT": _class(
        "lumina/model.py",
        Region({"noise_refiner": kinds.NEXT}),
        Region({"layers": kinds.NEXT}, "final_layer", "x"),
        stays_with="context num_tokens attention_mask",
    ),
    "OpenAISignatureMMDITWrapper": _class(
        "modules/diffusionmodules/mmdit.py",
        Region({"joint_blocks": kinds.JOINT}, "final_layer", "img"),
        stays_with="context y",
    ),
    "LTXVModel": _class(
        "lightricks/model.py",
        Region({"transformer_blocks": kinds.LTX}, "norm_out", "x"),
        stays_with=_LTX_WITH,
    ),
    "LTXAVModel": _class(
        "lightricks/av_model.py",
        Region({"transformer_blocks": kinds.LTX_AND_SOUND}, "norm_out", "x"),
        stays_with=f"{_LTX_WITH} audio_denoise_mask",
    ),
    "MiniMaxH3Model": _class(
        "minimax/model.py",
        Region({"blocks": kinds.MINIMAX}, "final_layer", Tokens("x", 0)),
        stays_with="context minimax_payload",
    ),
    "MiniTrainDIT": _class(
        "cosmos/predict2.py",
        kinds.COSMOS_BLOCKS,
        stays_with="context denoise_mask fps",
    ),
    # Each block gets its own text tokens, so tokens cannot stay sharded.
    "HiDreamImageTransformer2DModel": _class(
        "hidream/model.py",
        Region({"double_stream_blocks": kinds.HIDREAM_DOUBLE}),
        Region({"single_stream_blocks": kinds.HIDREAM_SINGLE}),
    ),
    "CogVideoXTransformer3DModel": _class(
        "cogvideo/model.py", Region({"blocks": kinds.COGVIDEO}, "norm_final", "img"), stays_with="context ofs"
    ),
    "Kandinsky5": _class(
        "kandinsky5/model.py",
        Region({"visual_transformer_blocks": kinds.KANDINSKY}, LAST_BLOCK),
        stays_with="context y attention_mask time_dim_replace",
    ),
    "MMDiT": _class(  # AuraFlow
        "aura/mmdit.py",
        Region(
            {"double_layers": kinds.AURA_DOUBLE, "single_layers": kinds.AURA_SINGLE}, "final_linear", "img"
        ),
        stays_with="context",
    ),
    "SingleStreamDiT": _class(
        "krea2/model.py", Region({"blocks": kinds.KREA}, "last", "x"), stays_with="context ref_latents"
    ),
    "ErnieImageModel": _class(
        "ernie/model.py", Region({"layers": kinds.ERNIE}, "final_norm", "x"), stays_with="context"
    ),
    "Anima": _class("anima/model.py", kinds.COSMOS_BLOCKS, stays_with="context t5xxl_ids t5xxl_weights"),
    "MageFlowTransformer2DModel": _class(
        "mage_flow/model.py",
        Region({"transformer_blocks": kinds.QWEN}, "norm_out", "img"),
        stays_with="context attention_mask ref_latents",
    ),
    "LensTransformer2DModel": _class(
        "lens/model.py",
        Region({"transformer_blocks": kinds.LENS}, "norm_out", "img"),
        stays_with="context attention_mask",
    ),
    "OmniGen2Transformer2DModel": _class(
        "omnigen/omnigen2.py",
        *kinds.OMNIGEN_REFINERS,
        Region({"layers": kinds.OMNIGEN}, "norm_out", "x"),
        stays_with="context num_tokens ref_latents",
    ),
    "BooguTransformer2DModel": _class(
        "boogu/model.py",
        *kinds.OMNIGEN_REFINERS,
        Region(
            {"double_stream_layers": kinds.BOOGU_DOUBLE, "single_stream_layers": kinds.BOOGU_SINGLE},
            "norm_out",
            "txt+img",
        ),
        stays_with="context num_tokens ref_latents",
    ),
    "Ideogram4Transformer2DModel": _class(
        "ideogram4/model.py",
        Region({"layers": kinds.IDEOGRAM}, "final_layer", "x"),
        stays_with="context attention_mask",
    ),
    "JoyImageTransformer3DModel": _class(
        "joyimage/model.py",
        Region({"double_blocks": kinds.JOY}, LAST_BLOCK),
        stays_with="context ref_latents",
    ),
    "PixArtMS": _class(
        "pixart/pixartms.py",
        Region({"blocks": kinds.PIXART}, "final_layer", "x"),
        stays_with="context c_size c_ar",
    ),
    # After its blocks it counts pixels by the number of tokens, which would be that of a shard.
    "ChromaRadiance": _class("chroma_radiance/model.py", Region(kinds.FLUX_BLOCKS)),
    "NextDiTPixelSpace": _class(
        "lumina/model.py",
        Region({"noise_refiner": kinds.NEXT}),
        Region({"layers": kinds.NEXT}, LAST_BLOCK),
        stays_with="context num_tokens",
    ),
    "PixDiT_T2I": _class(
        "pixeldit/model.py", Region({"patch_blocks": kinds.PIXELDIT}, LAST_BLOCK), stays_with="context"
    ),
    # Code between blocks adds a picture before every other block.
    "PidNet": _class("pixeldit/pid.py", Region({"patch_blocks": kinds.PIXELDIT})),
    "AceStepConditionGenerationModel": _class(
        "ace/ace_step15.py",
        Region({"decoder.layers": kinds.ACE_STEP}, "decoder.norm_out", "x"),
        stays_with="context lyric_embed refer_audio audio_codes is_covers",
        inseparable_rows=True,
    ),
    "Hunyuan3Dv2": _class("hunyuan3d/model.py", kinds.FLUX, stays_with="context guidance"),
    "HunYuanDiT": _class(
        "hydit/models.py",
        Region({"blocks": kinds.HUNYUAN_DIT}, "final_layer", "x"),
        stays_with="context text_embedding_mask encoder_hidden_states_t5 text_embedding_mask_t5 image_meta_size",
    ),
    "HunYuanDiTPlain": _class(
        "hunyuan3dv2_1/hunyuandit.py",
        Region({"blocks": kinds.HUNYUAN_3D}, "final_layer", "x"),
        stays_with="context",
        inseparable_rows=True,
    ),
    "LatentSeqMMFlowModel": _class(
        "triposplat/model.py",
        Region({"noise_refiner": kinds.TRIPOSPLAT}),
        Region({"blocks": kinds.TRIPOSPLAT}, LAST_BLOCK),
        stays_with="context ref_latents",
    ),
    "UNetModel": ModuleClass(
        "comfy/ldm/modules/diffusionmodules/openaimodel.py", (), frozenset(), bands=True
    ),
}

# Modules of other libraries behind the signature of one of ComfyUI's (models/diffusers/). The test suite proves them:
# they do not depend on ComfyUI's sources.
ADAPTERS: Mapping[str, ModuleClass] = {
    "DiffusersFlux": ModuleClass("", (kinds.DIFFUSERS_FLUX,), frozenset({"context", "y", "guidance"})),
}
