"""The tokens of each class of ComfyUI's transformers: which arguments of its blocks are, and where they may stay apart.

A class that is not here can be given fewer rows and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...requests import BLOCK, ROWS, STAY
from .regions import (
    LAST_BLOCK,
    Blocks,
    ExpandingTimestep,
    FirstToken,
    Ranges,
    Region,
    Tokens,
)


@dataclass(frozen=True)
class ModuleClass:
    """`source`: the class's file below ComfyUI's folder; `stays_with`: names of keyword arguments with which tokens
    were proven to stay apart; with any other one, each block gathers what it gives."""

    source: str
    regions: tuple[Region, ...]
    stays_with: frozenset[str]


# What ComfyUI's samplers put into transformer_options for every model.
_USUAL_OPTIONS = {"cond_or_uncond", "uuids", "sigmas", "sample_sigmas"}


def token_mode(class_name: str, kwargs: Mapping[str, Any]) -> str:
    """How a call of a module of that class shares out tokens (requests.TOKEN_MODES), by its keyword arguments alone."""
    entry = TABLE.get(class_name)
    if entry is None:
        return ROWS
    given = {name for name, value in kwargs.items() if value is not None} - {"transformer_options"}
    options = kwargs.get("transformer_options") or {}
    unusual = {name for name in set(options) - _USUAL_OPTIONS if _is_set(options[name])}
    return STAY if given <= entry.stays_with and not unusual else BLOCK


def _is_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_set, value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) > 0
    return value is not None and value is not False


def _class(source: str, *regions: Region, stays_with: str = "") -> ModuleClass:
    return ModuleClass(f"comfy/ldm/{source}", regions, frozenset(stays_with.split()))


_DOUBLE = Blocks(  # comfy.ldm.flux.layers.DoubleStreamBlock
    {
        "img": Tokens("img"),
        "txt": Tokens("txt"),
        "pe": Tokens("txt+img", 2),
        "modulation_dims_img": Ranges("img"),
        "modulation_dims_txt": Ranges("txt"),
    },
    gives=("img", "txt"),
    attends=("txt+img",),
)
_SINGLE = Blocks(  # comfy.ldm.flux.layers.SingleStreamBlock
    {"x": Tokens("txt+img"), "pe": Tokens("txt+img", 2), "modulation_dims": Ranges("txt+img")},
    gives=("x",),
    attends=("txt+img",),
)
_FLUX = Region({"double_blocks": _DOUBLE, "single_blocks": _SINGLE}, "final_layer", "img")

_WAN = Blocks(
    {"x": Tokens("x"), "freqs": Tokens("x"), "e": Tokens("x", grouped=True, ndim=4)},
    gives=("x",),
    attends=("x",),
)
_WAN_VACE = Blocks(
    {"c": Tokens("x"), "x": Tokens("x"), "freqs": Tokens("x"), "e": Tokens("x", grouped=True, ndim=4)},
    gives=("c", "c"),
    attends=("x",),
)

_QWEN = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "encoder_hidden_states_mask": Tokens("txt", -1),
        "image_rotary_emb": Tokens("txt+img", 2),
        "timestep_zero_index": FirstToken("img"),
    },
    gives=("encoder_hidden_states", "hidden_states"),
    attends=("txt+img",),
)

_NEXT = Blocks(  # comfy.ldm.lumina.model.JointTransformerBlock
    {"x": Tokens("x"), "freqs_cis": Tokens("x"), "timestep_zero_index": Ranges("x")},
    gives=("x",),
    attends=("x",),
)

_JOINT = Blocks({0: Tokens("txt"), 1: Tokens("img")}, gives=(0, 1), attends=("txt+img", "img"))  # SD3

_LTX = Blocks(
    {"x": Tokens("x"), "pe": Tokens("x"), "timestep": Tokens("x", grouped=True)}, gives=("x",), attends=("x",)
)
_LTX_AND_SOUND = Blocks(  # the few tokens of sound are whole on every rank
    {
        "x": Tokens("x", item=0),
        "v_pe": Tokens("x"),
        "v_cross_pe": Tokens("x"),
        "v_timestep": ExpandingTimestep("x"),
        "v_cross_scale_shift_timestep": ExpandingTimestep("x"),
        "v_cross_gate_timestep": ExpandingTimestep("x"),
    },
    gives=("x", None),
    attends=("x", None, None, None, None, (None, "x")),
)

_MINIMAX = Blocks(  # text, sound and video in one sequence of one row
    {"x": Tokens("x", 0), "mod_segments": Ranges("x"), "rope_freqs": Tokens("x")},
    gives=("x",),
    attends=("x",),
)

_COSMOS = Blocks(
    {
        "x_B_T_H_W_D": Tokens("x", 1, 3),
        "extra_per_block_pos_emb": Tokens("x", 1, 3),
        "rope_emb_L_1_1_D": Tokens("x"),
        "emb_B_T_D": Tokens("x", grouped=True),
        "adaln_lora_B_T_3D": Tokens("x", grouped=True),
    },
    gives=("x_B_T_H_W_D",),
    attends=("x",),
)

_HIDREAM_DOUBLE = Blocks(
    {"image_tokens": Tokens("img"), "text_tokens": Tokens("txt"), "rope": Tokens("img+txt")},
    gives=("image_tokens", "text_tokens"),
    attends=("img+txt",),
)
_HIDREAM_SINGLE = Blocks(
    {"image_tokens": Tokens("img"), "rope": Tokens("img")}, gives=("image_tokens",), attends=("img",)
)

_COGVIDEO = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "image_rotary_emb": Tokens("img", 0),
    },
    gives=("hidden_states", "encoder_hidden_states"),
    attends=("txt+img",),
)

_KANDINSKY = Blocks(
    {"visual_embed": Tokens("x"), "freqs": Tokens("x")}, gives=("visual_embed",), attends=("x",)
)

_AURA_DOUBLE = Blocks({"c": Tokens("txt"), "x": Tokens("img")}, gives=("c", "x"), attends=("txt+img",))
_AURA_SINGLE = Blocks({"cx": Tokens("txt+img")}, gives=("cx",), attends=("txt+img",))

_KREA = Blocks(
    {"x": Tokens("x"), "freqs": Tokens("x", 2), "timestep_zero_index": FirstToken("x")},
    gives=("x",),
    attends=("x",),
)

_ERNIE = Blocks({"x": Tokens("x"), "rotary_pos_emb": Tokens("x")}, gives=("x",), attends=("x",))

TABLE: Mapping[str, ModuleClass] = {
    # Not with ref_latents_method: "index_timestep_zero" looks at tokens between double and single blocks.
    "Flux": _class(
        "flux/model.py", _FLUX, stays_with="context y guidance ref_latents control attention_mask"
    ),
    "Chroma": _class("chroma/model.py", _FLUX, stays_with="context guidance"),
    "HunyuanVideo": _class(
        "hunyuan_video/model.py",
        _FLUX,
        stays_with="context y guidance attention_mask guiding_frame_index txt_byt5 clip_fea",
    ),
    "QwenImageTransformer2DModel": _class(
        "qwen_image/model.py",
        Region({"transformer_blocks": _QWEN}, "norm_out", "img"),
        stays_with="context attention_mask ref_latents ref_latents_method",
    ),
    "WanModel": _class("wan/model.py", Region({"blocks": _WAN}, "head", "x"), stays_with="context clip_fea"),
    "VaceWanModel": _class(
        "wan/model.py",
        Region({"blocks": _WAN, "vace_blocks": _WAN_VACE}, "head", "x"),
        stays_with="context vace_context vace_strength",
    ),
    "NextDiT": _class(
        "lumina/model.py",
        Region({"noise_refiner": _NEXT}),
        Region({"layers": _NEXT}, "final_layer", "x"),
        stays_with="context num_tokens",
    ),
    "OpenAISignatureMMDITWrapper": _class(
        "modules/diffusionmodules/mmdit.py",
        Region({"joint_blocks": _JOINT}, "final_layer", "img"),
        stays_with="context y",
    ),
    "LTXVModel": _class(
        "lightricks/model.py",
        Region({"transformer_blocks": _LTX}, "norm_out", "x"),
        stays_with="context frame_rate",
    ),
    "LTXAVModel": _class(
        "lightricks/av_model.py",
        Region({"transformer_blocks": _LTX_AND_SOUND}, "norm_out", "x"),
        stays_with="context frame_rate",
    ),
    "MiniMaxH3Model": _class(
        "minimax/model.py",
        Region({"blocks": _MINIMAX}, "final_layer", Tokens("x", 0)),
        stays_with="context minimax_payload",
    ),
    "MiniTrainDIT": _class(
        "cosmos/predict2.py",
        Region({"blocks": _COSMOS}, "final_layer", Tokens("x", 1, 3)),
        stays_with="context",
    ),
    # Each block has text of its own, so tokens never stay.
    "HiDreamImageTransformer2DModel": _class(
        "hidream/model.py",
        Region({"double_stream_blocks": _HIDREAM_DOUBLE}),
        Region({"single_stream_blocks": _HIDREAM_SINGLE}),
    ),
    "CogVideoXTransformer3DModel": _class(
        "cogvideo/model.py", Region({"blocks": _COGVIDEO}, "norm_final", "img"), stays_with="context"
    ),
    "Kandinsky5": _class(
        "kandinsky5/model.py",
        Region({"visual_transformer_blocks": _KANDINSKY}, LAST_BLOCK),
        stays_with="context y",
    ),
    "MMDiT": _class(  # AuraFlow
        "aura/mmdit.py",
        Region({"double_layers": _AURA_DOUBLE, "single_layers": _AURA_SINGLE}, "final_linear", "img"),
        stays_with="context",
    ),
    "SingleStreamDiT": _class(
        "krea2/model.py", Region({"blocks": _KREA}, "last", "x"), stays_with="context ref_latents"
    ),
    "ErnieImageModel": _class(
        "ernie/model.py", Region({"layers": _ERNIE}, "final_norm", "x"), stays_with="context"
    ),
}
