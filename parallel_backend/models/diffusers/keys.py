"""The parameters of Flux.1 as data: names and shapes in the original layout, and their counterparts in diffusers.

Original names: black-forest-labs/flux, src/flux/model.py. diffusers fuses nothing, so a fused original tensor is the
source of several diffusers parameters, each a range of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TIME_CHANNELS = 256  # width of the sinusoidal embedding of time and guidance


@dataclass(frozen=True)
class FluxDims:
    """Sizes in which Flux.1 models differ. hidden = heads * head_dim; mlp = width of the feed-forward layers."""

    hidden: int
    heads: int
    head_dim: int
    mlp: int
    double_blocks: int
    single_blocks: int
    context_dim: int
    pooled_dim: int
    in_channels: int
    out_channels: int
    guidance: bool

    @property
    def blocks(self) -> int:
        return self.double_blocks + self.single_blocks


# The sizes of the published FLUX.1-dev, for predictions without a file.
FLUX_DEV = FluxDims(
    hidden=3072,
    heads=24,
    head_dim=128,
    mlp=12288,
    double_blocks=19,
    single_blocks=38,
    context_dim=4096,
    pooled_dim=768,
    in_channels=64,
    out_channels=64,
    guidance=True,
)


# The layers of a double block's two streams in diffusers: norm, queries/keys/values, output, their norms, feed-forward.
_STREAMS = {
    "img": ("norm1", "attn.to_{}", "attn.to_out.0", "attn.norm_{}", "ff"),
    "txt": ("norm1_context", "attn.add_{}_proj", "attn.to_add_out", "attn.norm_added_{}", "ff_context"),
}
_HEAD_NORMS = {"q": "query_norm", "k": "key_norm"}


def _layers(dims: FluxDims) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Yields (a layer of the original layout, the shape of its weight, its layers in diffusers). If those are several,
    each has as many rows as the model's width, and the last one has the rest. A weight with one dim is a norm's."""
    h, mlp = dims.hidden, dims.mlp
    yield "img_in", (h, dims.in_channels), ("x_embedder",)
    yield "txt_in", (h, dims.context_dim), ("context_embedder",)
    embedders = [("time_in", "timestep", TIME_CHANNELS), ("vector_in", "text", dims.pooled_dim)]
    embedders += [("guidance_in", "guidance", TIME_CHANNELS)] if dims.guidance else []
    for key, what, width in embedders:
        yield f"{key}.in_layer", (h, width), (f"time_text_embed.{what}_embedder.linear_1",)
        yield f"{key}.out_layer", (h, h), (f"time_text_embed.{what}_embedder.linear_2",)
    for i in range(dims.double_blocks):
        target = f"transformer_blocks.{i}"
        for stream, (modulation, projection, out, norm, feed_forward) in _STREAMS.items():
            key = f"double_blocks.{i}.{stream}"
            yield f"{key}_mod.lin", (6 * h, h), (f"{target}.{modulation}.linear",)
            yield (
                f"{key}_attn.qkv",
                (3 * h, h),
                tuple(f"{target}.{projection.format(part)}" for part in "qkv"),
            )
            yield f"{key}_attn.proj", (h, h), (f"{target}.{out}",)
            yield f"{key}_mlp.0", (mlp, h), (f"{target}.{feed_forward}.net.0.proj",)
            yield f"{key}_mlp.2", (h, mlp), (f"{target}.{feed_forward}.net.2",)
            for part, name in _HEAD_NORMS.items():
                yield f"{key}_attn.norm.{name}", (dims.head_dim,), (f"{target}.{norm.format(part)}",)
    for i in range(dims.single_blocks):
        key, target = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        projections = (f"{target}.attn.to_{part}" for part in "qkv")
        yield f"{key}.modulation.lin", (3 * h, h), (f"{target}.norm.linear",)
        yield f"{key}.linear1", (3 * h + mlp, h), (*projections, f"{target}.proj_mlp")
        yield f"{key}.linear2", (h, h + mlp), (f"{target}.proj_out",)
        for part, name in _HEAD_NORMS.items():
            yield f"{key}.norm.{name}", (dims.head_dim,), (f"{target}.attn.norm_{part}",)
    yield "final_layer.linear", (dims.out_channels, h), ("proj_out",)
    yield "final_layer.adaLN_modulation.1", (2 * h, h), ("norm_out.linear",)


def original_shapes(dims: FluxDims) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of the original layout with its shape ([out, in] for weights)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, shape, _ in _layers(dims):
        is_norm = len(shape) == 1
        shapes |= {f"{key}.scale": shape} if is_norm else {f"{key}.weight": shape, f"{key}.bias": shape[:1]}
    return shapes


def diffusers_sources(dims: FluxDims) -> dict[str, tuple[str, slice]]:
    """Returns every parameter of diffusers' FluxTransformer2DModel with (the original tensor, its rows) that it is."""
    sources: dict[str, tuple[str, slice]] = {}
    for key, shape, targets in _layers(dims):
        stops = [*(dims.hidden * n for n in range(1, len(targets))), shape[0]]
        parts = {"weight": "scale"} if len(shape) == 1 else {"weight": "weight", "bias": "bias"}
        for target, start, stop in zip(targets, [0, *stops], stops, strict=False):
            for part, stored in parts.items():
                sources[f"{target}.{part}"] = (f"{key}.{stored}", slice(start, stop))
    return sources


def diffusers_shapes(dims: FluxDims) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of diffusers' layout with its shape."""
    original, sources = original_shapes(dims), diffusers_sources(dims)
    return {name: (rows.stop - rows.start, *original[key][1:]) for name, (key, rows) in sources.items()}
