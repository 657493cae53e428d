"""The parameters of Flux.1 as data: names and shapes in the original layout, and their counterparts in diffusers.

Original names: black-forest-labs/flux, src/flux/model.py. diffusers fuses nothing, so a fused original tensor is the
source of several diffusers parameters, each a range of its rows.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Source:
    """The origin of a diffusers parameter: rows [start, stop) of the original tensor `key`, or all of it."""

    key: str
    start: int | None = None
    stop: int | None = None


def original_shapes(dims: FluxDims) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of the original layout with its shape ([out, in] for weights)."""
    h, mlp = dims.hidden, dims.mlp
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, out_features: int, in_features: int) -> None:
        shapes[f"{name}.weight"] = (out_features, in_features)
        shapes[f"{name}.bias"] = (out_features,)

    linear("img_in", h, dims.in_channels)
    linear("txt_in", h, dims.context_dim)
    embedders = [("time_in", TIME_CHANNELS), ("vector_in", dims.pooled_dim)]
    embedders += [("guidance_in", TIME_CHANNELS)] if dims.guidance else []
    for name, width in embedders:
        linear(f"{name}.in_layer", h, width)
        linear(f"{name}.out_layer", h, h)
    for i in range(dims.double_blocks):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            linear(f"{block}_mod.lin", 6 * h, h)
            linear(f"{block}_attn.qkv", 3 * h, h)
            linear(f"{block}_attn.proj", h, h)
            linear(f"{block}_mlp.0", mlp, h)
            linear(f"{block}_mlp.2", h, mlp)
            for norm in ("query_norm", "key_norm"):
                shapes[f"{block}_attn.norm.{norm}.scale"] = (dims.head_dim,)
    for i in range(dims.single_blocks):
        block = f"single_blocks.{i}"
        linear(f"{block}.modulation.lin", 3 * h, h)
        linear(f"{block}.linear1", 3 * h + mlp, h)
        linear(f"{block}.linear2", h, h + mlp)
        for norm in ("query_norm", "key_norm"):
            shapes[f"{block}.norm.{norm}.scale"] = (dims.head_dim,)
    linear("final_layer.linear", dims.out_channels, h)
    linear("final_layer.adaLN_modulation.1", 2 * h, h)
    return shapes


def diffusers_sources(dims: FluxDims) -> dict[str, Source]:
    """Returns every parameter of diffusers' FluxTransformer2DModel with the rows of the original tensor that it is."""
    h = dims.hidden
    sources: dict[str, Source] = {}

    def linear(target: str, key: str, start: int | None = None, stop: int | None = None) -> None:
        for part in ("weight", "bias"):
            sources[f"{target}.{part}"] = Source(f"{key}.{part}", start, stop)

    def norm(target: str, key: str) -> None:
        sources[f"{target}.weight"] = Source(f"{key}.scale")

    linear("x_embedder", "img_in")
    linear("context_embedder", "txt_in")
    embedders = [("timestep_embedder", "time_in"), ("text_embedder", "vector_in")]
    embedders += [("guidance_embedder", "guidance_in")] if dims.guidance else []
    for target, key in embedders:
        linear(f"time_text_embed.{target}.linear_1", f"{key}.in_layer")
        linear(f"time_text_embed.{target}.linear_2", f"{key}.out_layer")
    for i in range(dims.double_blocks):
        target, key = f"transformer_blocks.{i}", f"double_blocks.{i}"
        streams = [
            ("img", "norm1", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k"), "ff"),
            (
                "txt",
                "norm1_context",
                ("add_q_proj", "add_k_proj", "add_v_proj"),
                "to_add_out",
                ("norm_added_q", "norm_added_k"),
                "ff_context",
            ),
        ]
        for stream, modulation, projections, out, norms, feed_forward in streams:
            linear(f"{target}.{modulation}.linear", f"{key}.{stream}_mod.lin")
            for n, projection in enumerate(projections):
                linear(f"{target}.attn.{projection}", f"{key}.{stream}_attn.qkv", n * h, (n + 1) * h)
            linear(f"{target}.attn.{out}", f"{key}.{stream}_attn.proj")
            norm(f"{target}.attn.{norms[0]}", f"{key}.{stream}_attn.norm.query_norm")
            norm(f"{target}.attn.{norms[1]}", f"{key}.{stream}_attn.norm.key_norm")
            linear(f"{target}.{feed_forward}.net.0.proj", f"{key}.{stream}_mlp.0")
            linear(f"{target}.{feed_forward}.net.2", f"{key}.{stream}_mlp.2")
    for i in range(dims.single_blocks):
        target, key = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        linear(f"{target}.norm.linear", f"{key}.modulation.lin")
        for n, projection in enumerate(("to_q", "to_k", "to_v")):
            linear(f"{target}.attn.{projection}", f"{key}.linear1", n * h, (n + 1) * h)
        linear(f"{target}.proj_mlp", f"{key}.linear1", 3 * h, 3 * h + dims.mlp)
        linear(f"{target}.proj_out", f"{key}.linear2")
        norm(f"{target}.attn.norm_q", f"{key}.norm.query_norm")
        norm(f"{target}.attn.norm_k", f"{key}.norm.key_norm")
    linear("norm_out.linear", "final_layer.adaLN_modulation.1")
    linear("proj_out", "final_layer.linear")
    return sources


def diffusers_shapes(dims: FluxDims) -> dict[str, tuple[int, ...]]:
    """Returns every parameter of diffusers' layout with its shape."""
    original = original_shapes(dims)
    shapes = {}
    for name, source in diffusers_sources(dims).items():
        rows, *rest = original[source.key]
        stop = rows if source.stop is None else source.stop
        shapes[name] = (stop - (source.start or 0), *rest)
    return shapes
