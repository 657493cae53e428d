"""The arguments and outputs of each kind of block in ComfyUI's models, and regions that several classes share."""

from __future__ import annotations

from dataclasses import replace

from .regions import (
    Blocks,
    Branch,
    ExpandingTimestep,
    FirstToken,
    Guided,
    Projection,
    Projections,
    Ranges,
    Region,
    Sliced,
    Tokens,
    Window,
)


def _mlp(path: str) -> tuple[Branch, ...]:
    """Returns the two forms of a feed-forward network of ComfyUI's Flux."""
    gated = Branch((f"{path}.gate_proj", f"{path}.up_proj"), f"{path}.down_proj")
    return Branch((f"{path}.0",), f"{path}.2"), gated


DOUBLE = Blocks(  # comfy.ldm.flux.layers.DoubleStreamBlock
    {
        "img": Tokens("img"),
        "txt": Tokens("txt"),
        "pe": Tokens("txt+img", 2),
        "modulation_dims_img": Ranges("img"),
        "modulation_dims_txt": Ranges("txt"),
    },
    gives=("img", "txt"),
    attends=("txt+img",),
    projections=Projections(
        (Projection("img_attn.qkv", "img"), Projection("txt_attn.qkv", "txt")), "num_heads", rotary="pe"
    ),
    sliced=Sliced(
        (
            Branch(("img_attn.qkv",), "img_attn.proj"),
            Branch(("txt_attn.qkv",), "txt_attn.proj"),
            *_mlp("img_mlp"),
            *_mlp("txt_mlp"),
        ),
        counts=("num_heads", "img_attn.num_heads", "txt_attn.num_heads"),
        joined=("img_mod.lin", "txt_mod.lin"),
    ),
)
SINGLE = Blocks(  # comfy.ldm.flux.layers.SingleStreamBlock
    {"x": Tokens("txt+img"), "pe": Tokens("txt+img", 2), "modulation_dims": Ranges("txt+img")},
    gives=("x",),
    attends=("txt+img",),
    projections=Projections((Projection("linear1", "txt+img", rest=True),), "num_heads", rotary="pe"),
    sliced=Sliced(
        (Branch(("linear1",), "linear2", heads="hidden_size"),),
        counts=("num_heads", "hidden_size", "mlp_hidden_dim", "mlp_hidden_dim_first"),
        joined=("modulation.lin",),
    ),
)
FLUX_BLOCKS = {"double_blocks": DOUBLE, "single_blocks": SINGLE}
FLUX = Region(FLUX_BLOCKS, "final_layer", "img")


def _apart(stream: str, *paths: str) -> tuple[Projection, ...]:
    """Returns separate layers for queries, keys and values."""
    return tuple(Projection(path, stream, parts=1) for path in paths)


_DIFFUSERS_DOUBLE = Blocks(  # diffusers' FluxTransformerBlock
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "image_rotary_emb": Tokens("txt+img", 0),
    },
    gives=("encoder_hidden_states", "hidden_states"),
    attends=("txt+img",),
    projections=Projections(
        _apart("img", "attn.to_q", "attn.to_k", "attn.to_v")
        + _apart("txt", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        "attn.heads",
        rotary="image_rotary_emb",
    ),
    sliced=Sliced(
        (
            Branch(("attn.to_q", "attn.to_k", "attn.to_v"), "attn.to_out.0"),
            Branch(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.to_add_out"),
            Branch(("ff.net.0.proj",), "ff.net.2"),
            Branch(("ff_context.net.0.proj",), "ff_context.net.2"),
        ),
        counts=("attn.heads", "attn.inner_dim"),
        joined=("norm1.linear", "norm1_context.linear"),
    ),
)
_DIFFUSERS_SINGLE = replace(  # diffusers' FluxSingleTransformerBlock, which returns both streams
    _DIFFUSERS_DOUBLE,
    projections=Projections(
        _apart("txt+img", "attn.to_q", "attn.to_k", "attn.to_v"), "attn.heads", rotary="image_rotary_emb"
    ),
    sliced=Sliced(
        (Branch(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "proj_out", heads="attn.inner_dim"),),
        counts=("attn.heads", "attn.inner_dim"),
        joined=("norm.linear",),
    ),
)
DIFFUSERS_FLUX = Region(
    {
        "transformer.transformer_blocks": _DIFFUSERS_DOUBLE,
        "transformer.single_transformer_blocks": _DIFFUSERS_SINGLE,
    },
    "transformer.norm_out",
    "img",
)

WAN = Blocks(
    {"x": Tokens("x"), "freqs": Tokens("x"), "e": Tokens("x", grouped=True, ndim=4)},
    gives=("x",),
    attends=("x",),
    projections=Projections(
        _apart("x", "self_attn.q", "self_attn.k", "self_attn.v"),
        "self_attn.num_heads",
        rotary="freqs",
        norms=("self_attn.norm_q", "self_attn.norm_k"),
    ),
    sliced=Sliced(
        (
            Branch(("self_attn.q", "self_attn.k", "self_attn.v"), "self_attn.o"),
            Branch(
                ("cross_attn.q", "cross_attn.k", "cross_attn.v", "cross_attn.k_img", "cross_attn.v_img"),
                "cross_attn.o",
            ),
            Branch(("ffn.0",), "ffn.2"),
        ),
        counts=("self_attn.num_heads", "cross_attn.num_heads"),
        norms=(
            "self_attn.norm_q",
            "self_attn.norm_k",
            "cross_attn.norm_q",
            "cross_attn.norm_k",
            "cross_attn.norm_k_img",
        ),
        replicated=("before_proj", "after_proj"),
    ),
)
WAN_BLOCKS = Region({"blocks": WAN}, "head", "x")
WAN_VACE = replace(WAN, arguments={"c": Tokens("x"), **WAN.arguments}, gives=("c", "c"))

HUMO = replace(WAN, attends=("x", None, None), whole={"audio_cross_attn_wrapper": Tokens("x")}, sliced=None)

QWEN = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "encoder_hidden_states_mask": Tokens("txt", -1),
        "image_rotary_emb": Tokens("txt+img", 2),
        "timestep_zero_index": FirstToken("img"),
    },
    gives=("encoder_hidden_states", "hidden_states"),
    attends=("txt+img",),
    projections=_DIFFUSERS_DOUBLE.projections,  # its attention uses diffusers' names
    sliced=Sliced(
        (
            Branch(("attn.to_q", "attn.to_k", "attn.to_v"), "attn.to_out.0"),
            Branch(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.to_add_out"),
            Branch(("img_mlp.net.0.proj",), "img_mlp.net.2"),
            Branch(("txt_mlp.net.0.proj",), "txt_mlp.net.2"),
        ),
        counts=("attn.heads",),
        joined=("img_mod.1", "txt_mod.1"),
    ),
)

LENS = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "freqs_cis": Tokens("img+txt", 2),
        "attention_mask": Tokens("img+txt", -1),
    },
    gives=("encoder_hidden_states", "hidden_states"),
    attends=("img+txt",),
)

JOY = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "image_rotary_emb": Tokens("img"),
    },
    gives=("hidden_states", "encoder_hidden_states"),
    attends=("img+txt",),
    projections=Projections(
        (Projection("attn.img_attn_qkv", "img"), Projection("attn.txt_attn_qkv", "txt")),
        "attn.num_attention_heads",
        rotary="image_rotary_emb",
    ),
)

OMNIGEN = Blocks(
    {"hidden_states": Tokens("x"), "image_rotary_emb": Tokens("x")}, gives=("hidden_states",), attends=("x",)
)
BOOGU_DOUBLE = Blocks(
    {
        "img_hidden_states": Tokens("img"),
        "instruct_hidden_states": Tokens("txt"),
        "joint_rotary_emb": Tokens("txt+img"),
        "img_rotary_emb": Tokens("img"),
    },
    gives=("img_hidden_states", "instruct_hidden_states"),
    attends=("txt+img", "img"),
)
BOOGU_SINGLE = Blocks(
    {"hidden_states": Tokens("txt+img"), "image_rotary_emb": Tokens("txt+img")},
    gives=("hidden_states",),
    attends=("txt+img",),
)
OMNIGEN_REFINERS = (Region({"noise_refiner": OMNIGEN}), Region({"ref_image_refiner": OMNIGEN}))

IDEOGRAM = Blocks(
    {"x": Tokens("x"), "freqs_cis": Tokens("x")},
    gives=("x",),
    attends=("x",),
    projections=Projections((Projection("attention.qkv", "x"),), "attention.num_heads", rotary="freqs_cis"),
)

PIXART = Blocks({"x": Tokens("x")}, gives=("x",), attends=("x", None))

ACE_STEP = Blocks(
    {"hidden_states": Tokens("x"), "position_embeddings": Tokens("x", 0)},
    gives=("hidden_states",),
    attends=(Window("x", "self_attn.sliding_window"), None),
)

PIXELDIT = Blocks(
    {"x": Tokens("img"), "y": Tokens("txt"), "pos_img": Tokens("img", 0), "pos_txt": Tokens("txt", 0)},
    gives=("x", "y"),
    attends=("txt+img",),
)

NEXT = Blocks(  # comfy.ldm.lumina.model.JointTransformerBlock
    {"x": Tokens("x"), "freqs_cis": Tokens("x"), "timestep_zero_index": Ranges("x")},
    gives=("x",),
    attends=("x",),
)

JOINT = Blocks(  # SD3
    {0: Tokens("txt"), 1: Tokens("img")},
    gives=(0, 1),
    attends=("txt+img", "img"),
    projections=Projections(
        (Projection("context_block.attn.qkv", "txt"), Projection("x_block.attn.qkv", "img")),
        "x_block.attn.num_heads",
    ),
    sliced=Sliced(
        (
            Branch(("context_block.attn.qkv",), "context_block.attn.proj"),
            Branch(("x_block.attn.qkv",), "x_block.attn.proj"),
            Branch(("x_block.attn2.qkv",), "x_block.attn2.proj"),
            Branch(("context_block.mlp.fc1",), "context_block.mlp.fc2"),
            Branch(("x_block.mlp.fc1",), "x_block.mlp.fc2"),
        ),
        counts=("context_block.attn.num_heads", "x_block.attn.num_heads", "x_block.attn2.num_heads"),
        joined=("context_block.adaLN_modulation.1", "x_block.adaLN_modulation.1"),
    ),
)

_GUIDED = Guided("x", "self_attention_mask")
LTX = Blocks(
    {"x": Tokens("x"), "pe": Tokens("x"), "timestep": Tokens("x", grouped=True)},
    gives=("x",),
    attends=(_GUIDED,),
)
LTX_AND_SOUND = Blocks(  # every rank has all of the few audio tokens
    {
        "x": Tokens("x", item=0),
        "v_pe": Tokens("x"),
        "v_cross_pe": Tokens("x"),
        "v_timestep": ExpandingTimestep("x"),
        "v_cross_scale_shift_timestep": ExpandingTimestep("x"),
        "v_cross_gate_timestep": ExpandingTimestep("x"),
    },
    gives=("x", None),
    attends=(_GUIDED, None, None, None, None, (None, "x")),
)

MINIMAX = Blocks(  # text, audio and video in one sequence, of one row
    {"x": Tokens("x", 0), "mod_segments": Ranges("x"), "rope_freqs": Tokens("x")},
    gives=("x",),
    attends=("x",),
    projections=Projections((Projection("attn.qkv_proj", "x"),), "attn.heads", rotary="rope_freqs"),
)

COSMOS = Blocks(
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

COSMOS_BLOCKS = Region({"blocks": COSMOS}, "final_layer", Tokens("x", 1, 3))

HIDREAM_DOUBLE = Blocks(
    {"image_tokens": Tokens("img"), "text_tokens": Tokens("txt"), "rope": Tokens("img+txt")},
    gives=("image_tokens", "text_tokens"),
    attends=("img+txt",),
)
HIDREAM_SINGLE = Blocks(
    {"image_tokens": Tokens("img"), "rope": Tokens("img")}, gives=("image_tokens",), attends=("img",)
)

COGVIDEO = Blocks(
    {
        "hidden_states": Tokens("img"),
        "encoder_hidden_states": Tokens("txt"),
        "image_rotary_emb": Tokens("img", 0),
    },
    gives=("hidden_states", "encoder_hidden_states"),
    attends=("txt+img",),
)

KANDINSKY = Blocks(
    {"visual_embed": Tokens("x"), "freqs": Tokens("x")}, gives=("visual_embed",), attends=("x",)
)

AURA_DOUBLE = Blocks({"c": Tokens("txt"), "x": Tokens("img")}, gives=("c", "x"), attends=("txt+img",))
AURA_SINGLE = Blocks({"cx": Tokens("txt+img")}, gives=("cx",), attends=("txt+img",))

KREA = Blocks(
    {"x": Tokens("x"), "freqs": Tokens("x", 2), "timestep_zero_index": FirstToken("x")},
    gives=("x",),
    attends=("x",),
)

ERNIE = Blocks(
    {"x": Tokens("x"), "rotary_pos_emb": Tokens("x")},
    gives=("x",),
    attends=("x",),
    projections=Projections(
        _apart("x", "self_attention.to_q", "self_attention.to_k", "self_attention.to_v"),
        "self_attention.heads",
        rotary="rotary_pos_emb",
    ),
)

HUNYUAN_DIT = Blocks(
    {"x": Tokens("x"), "freq_cis_img": Tokens("x", 0), "skip": Tokens("x", passed=True)},
    gives=("x",),
    attends=("x", None),
)
HUNYUAN_3D = Blocks(
    {"hidden_states": Tokens("x"), "skip_tensor": Tokens("x", passed=True)},
    gives=("hidden_states",),
    attends=("x", None),
)

TRIPOSPLAT = Blocks({"x": Tokens("x"), "rotary_emb": Tokens("x", passed=True)}, gives=("x",), attends=("x",))
