"""The places in networks that the ways change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The places in one network that the ways change. `block`, `weight` and `number` are paths in it; `child` is a path
    in the block."""

    block: str  # an entry of a ModuleList; takes tokens [B, L, C] as its first argument and returns tokens
    twins: tuple[str, str]  # modules of one class and size, with other weights
    child: str  # a layer of the block; takes only tokens and returns tokens
    weight: str
    number: str  # a plain number that the network computes with
    changed_to: float
    method: str  # a method of the network that `forward` calls and that calls the blocks
    attention: tuple[str, str]  # the module whose global the block calls, and the global's name
    replaced: tuple[str, int] | None  # the block's key in `patches_replace["dit"]`, None if it has none


PLACES = {
    "Flux": Place(
        block="single_blocks.0",
        twins=("double_blocks.0.img_attn.proj", "double_blocks.0.txt_attn.proj"),
        child="linear2",
        weight="single_blocks.0.linear2.weight",
        number="pe_embedder.theta",
        changed_to=50,
        method="forward_orig",
        attention=("comfy.ldm.flux.layers", "attention"),
        replaced=("single_block", 0),
    ),
    "WanModel": Place(
        block="blocks.1",
        twins=("blocks.1", "blocks.0"),
        child="ffn",
        weight="blocks.1.ffn.2.weight",
        number="rope_embedder.theta",
        changed_to=50,
        method="forward_orig",
        attention=("comfy.ldm.wan.model", "optimized_attention"),
        replaced=("double_block", 1),
    ),
    "UNetModel": Place(
        block="input_blocks.1.1.transformer_blocks.0",
        twins=("input_blocks.1.1.transformer_blocks.0", "output_blocks.2.1.transformer_blocks.0"),
        child="ff",
        weight="input_blocks.1.1.transformer_blocks.0.ff.net.2.weight",
        number="input_blocks.1.1.transformer_blocks.0.attn1.heads",
        changed_to=4,
        method="_forward",
        attention=("comfy.ldm.modules.attention", "optimized_attention"),
        replaced=None,
    ),
}
