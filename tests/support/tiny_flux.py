"""Writes a random, tiny Flux checkpoint: small enough for a CPU test, real enough for every loader.

Only head_dim (128), rope axes (16, 56, 56), the mlp ratio (4) and the 16 latent channels are fixed, because stock
loaders assume them; heads, depths and text widths are free. The weights are drawn in the original key layout and, for
``layout="diffusers"``, converted, so both layouts of one seed are the same network.

The weights are scaled so that the output is of order one and answers clearly to text, pooled text, guidance and
timestep: a test that drops one of them must see a difference far above rounding.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HEAD_DIM = 128
LATENT_CHANNELS = 16
PATCHED_CHANNELS = LATENT_CHANNELS * 2 * 2
TIME_EMBEDDING = 256
MLP_RATIO = 4

# Standard deviation of a weight is gain / sqrt(fan_in). Modulation (shift, scale, gate) is held below one so that a
# few blocks neither die out nor amplify rounding; everything else keeps the variance of its input.
MODULATION_GAIN = 0.7
BIAS_STD = 0.1
# Frequencies of the time embedding above this one are damped as 1/frequency. The embedding's argument is 1000 * t, so
# undamped weights would turn one unit of rounding in t into 3e-5 of the output, which no trained model does.
SMOOTH_FREQUENCY = 0.02
NORM_STD = 0.1


def write_tiny_flux(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    layout: str = "bfl",
    **sizes: Any,
) -> Path:
    """Writes the checkpoint to ``path`` (its folder is made) and returns the path.

    ``prefix`` is put before every key, for instance ``model.diffusion_model.``; ``sizes``: see tiny_flux_tensors.

    Raises:
        ValueError: ``layout`` is neither ``bfl`` nor ``diffusers``.
    """
    if layout not in ("bfl", "diffusers"):
        raise ValueError(f"layout is {layout!r}; it can be 'bfl' or 'diffusers'")
    tensors = tiny_flux_tensors(**sizes)
    if layout == "diffusers":
        tensors = to_diffusers_layout(tensors)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}, path)
    return path


def tiny_flux_tensors(
    *,
    heads: int = 2,
    double_blocks: int = 1,
    single_blocks: int = 1,
    context_dim: int = 64,
    pooled_dim: int = 32,
    guidance: bool = True,
    seed: int = 0,
    scale: float = 1.0,
    in_channels: int = PATCHED_CHANNELS,
) -> dict[str, torch.Tensor]:
    """Returns the fp32 tensors by their original (Black Forest Labs) keys. ``guidance=False`` gives a schnell (no
    ``guidance_in``); ``scale`` multiplies the network's output; ``in_channels``: 384 for Fill."""
    generator = torch.Generator().manual_seed(seed)
    hidden = heads * HEAD_DIM
    mlp = hidden * MLP_RATIO
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, inputs: int, outputs: int, gain: float = 1.0) -> None:
        weight = torch.randn(outputs, inputs, generator=generator)
        tensors[f"{name}.weight"] = weight * (gain / inputs**0.5)
        tensors[f"{name}.bias"] = torch.randn(outputs, generator=generator) * BIAS_STD

    def mlp_embedder(name: str, inputs: int) -> None:
        # The factor 2 makes up for what SiLU takes from a unit-variance input.
        linear(f"{name}.in_layer", inputs, hidden, gain=2.0)
        linear(f"{name}.out_layer", hidden, hidden)

    def head_norm(name: str) -> None:
        tensors[f"{name}.scale"] = 1 + torch.randn(HEAD_DIM, generator=generator) * NORM_STD

    def time_embedder(name: str) -> None:
        mlp_embedder(name, TIME_EMBEDDING)
        frequencies = 10_000 ** -(torch.arange(TIME_EMBEDDING // 2) / (TIME_EMBEDDING // 2))
        damping = (SMOOTH_FREQUENCY / frequencies).clamp(max=1.0)
        tensors[f"{name}.in_layer.weight"] *= damping.repeat(2)  # one half is cos, the other sin

    linear("img_in", in_channels, hidden)
    linear("txt_in", context_dim, hidden)
    time_embedder("time_in")
    mlp_embedder("vector_in", pooled_dim)
    if guidance:
        time_embedder("guidance_in")
    for index in range(double_blocks):
        for stream in ("img", "txt"):
            block = f"double_blocks.{index}.{stream}"
            linear(f"{block}_mod.lin", hidden, 6 * hidden, gain=MODULATION_GAIN)
            linear(f"{block}_attn.qkv", hidden, 3 * hidden)
            head_norm(f"{block}_attn.norm.query_norm")
            head_norm(f"{block}_attn.norm.key_norm")
            linear(f"{block}_attn.proj", hidden, hidden, gain=2.0)
            linear(f"{block}_mlp.0", hidden, mlp)
            linear(f"{block}_mlp.2", mlp, hidden)
    for index in range(single_blocks):
        block = f"single_blocks.{index}"
        linear(f"{block}.modulation.lin", hidden, 3 * hidden, gain=MODULATION_GAIN)
        linear(f"{block}.linear1", hidden, 3 * hidden + mlp)
        head_norm(f"{block}.norm.query_norm")
        head_norm(f"{block}.norm.key_norm")
        linear(f"{block}.linear2", hidden + mlp, hidden, gain=2.0)
    linear("final_layer.adaLN_modulation.1", hidden, 2 * hidden, gain=MODULATION_GAIN)
    linear("final_layer.linear", hidden, PATCHED_CHANNELS)
    tensors["final_layer.linear.weight"] *= scale
    tensors["final_layer.linear.bias"] *= scale
    return tensors


def tiny_flux_config(
    *,
    heads: int = 2,
    double_blocks: int = 1,
    single_blocks: int = 1,
    context_dim: int = 64,
    pooled_dim: int = 32,
    guidance: bool = True,
) -> dict[str, object]:
    """Returns the keyword arguments of diffusers' ``FluxTransformer2DModel`` for the same network."""
    return {
        "in_channels": PATCHED_CHANNELS,
        "num_layers": double_blocks,
        "num_single_layers": single_blocks,
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": heads,
        "joint_attention_dim": context_dim,
        "pooled_projection_dim": pooled_dim,
        "guidance_embeds": guidance,
        "axes_dims_rope": (16, 56, 56),
    }


# diffusers' names for each original layer, where {} is the number of a block; several share the rows of a fused layer.
_NAMES = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "double_blocks.{}.img_mod.lin": ("norm1.linear",),
    "double_blocks.{}.txt_mod.lin": ("norm1_context.linear",),
    "double_blocks.{}.img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "double_blocks.{}.txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "double_blocks.{}.img_attn.proj": ("attn.to_out.0",),
    "double_blocks.{}.txt_attn.proj": ("attn.to_add_out",),
    "double_blocks.{}.img_mlp.0": ("ff.net.0.proj",),
    "double_blocks.{}.img_mlp.2": ("ff.net.2",),
    "double_blocks.{}.txt_mlp.0": ("ff_context.net.0.proj",),
    "double_blocks.{}.txt_mlp.2": ("ff_context.net.2",),
    "double_blocks.{}.img_attn.norm.query_norm": ("attn.norm_q",),
    "double_blocks.{}.img_attn.norm.key_norm": ("attn.norm_k",),
    "double_blocks.{}.txt_attn.norm.query_norm": ("attn.norm_added_q",),
    "double_blocks.{}.txt_attn.norm.key_norm": ("attn.norm_added_k",),
    "single_blocks.{}.modulation.lin": ("norm.linear",),
    "single_blocks.{}.linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "single_blocks.{}.linear2": ("proj_out",),
    "single_blocks.{}.norm.query_norm": ("attn.norm_q",),
    "single_blocks.{}.norm.key_norm": ("attn.norm_k",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "final_layer.linear": ("proj_out",),
}


def to_diffusers_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the same network by diffusers' keys: fused projections split, the last scale and shift swapped."""
    converted: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name, kind = key.rsplit(".", 1)
        prefix = ""
        if block := re.match(r"(double|single)_blocks\.(\d+)", name):
            prefix = f"{'single_' if block[1] == 'single' else ''}transformer_blocks.{block[2]}."
            name = name.replace(block[2], "{}", 1)
        if name == "final_layer.adaLN_modulation.1":
            # The original computes (shift, scale), diffusers' AdaLayerNormContinuous (scale, shift).
            tensor = torch.cat(tensor.chunk(2)[::-1])
        parts = _NAMES[name]
        rows = len(tensor) // (3 + MLP_RATIO if "proj_mlp" in parts else len(parts))
        pieces = tensor.tensor_split([rows * n for n in range(1, len(parts))])
        for part, piece in zip(parts, pieces, strict=True):
            converted[f"{prefix}{part}.{'weight' if kind == 'scale' else kind}"] = piece
    return converted
