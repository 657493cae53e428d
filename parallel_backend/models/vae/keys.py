"""The decoder of Flux's and Stable Diffusion's AutoencoderKL as data: its tensors in ldm's names, and diffusers' names.

ldm names: CompVis/stable-diffusion, ldm/modules/diffusionmodules/model.py; ComfyUI keeps them. ldm counts its levels
from the finest (`up.0`), diffusers its up blocks from the coarsest (`up_blocks.0`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import RequestError

GROUPS = 32  # of every group norm in ldm
_RESNET = {"norm1": "norm1", "conv1": "conv1", "norm2": "norm2", "conv2": "conv2"}
_ATTENTION = {"norm": "group_norm", "q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "to_out.0"}


@dataclass(frozen=True)
class VaeDims:
    """Sizes that tell one decoder from another. `widths`: channels per level, the finest first, as both layouts do.

    `latent_channels`: of the latent; `z_channels`: after the 1x1 convolution that SD has and Flux lacks (`post_quant`).
    """

    latent_channels: int
    z_channels: int
    out_channels: int
    widths: tuple[int, ...]
    resnets: int
    post_quant: bool

    @property
    def scale(self) -> int:
        """Pixels per latent position, along each side."""
        return 2 ** (len(self.widths) - 1)


def decoder_keys(names: Mapping[str, object]) -> list[str]:
    """The names, in ldm layout, of what decoding needs."""
    return [name for name in names if name.startswith(("decoder.", "post_quant_conv."))]


def read_dims(shapes: Mapping[str, tuple[int, ...]]) -> VaeDims:
    """The sizes of the decoder with these tensors. Raises RequestError, saying what differs, for any other network."""
    if any(name.startswith("bn.") for name in shapes):
        raise RequestError("it normalises its latents first, as Flux.2's VAE does")
    mine = {name: tuple(shapes[name]) for name in decoder_keys(shapes)}
    try:
        dims = _measure(mine)
    except (KeyError, IndexError):
        raise RequestError("it is not built like the VAEs of Flux and Stable Diffusion") from None
    expected = ldm_shapes(dims)
    odd = sorted(name for name in mine.keys() | expected.keys() if mine.get(name) != expected.get(name))
    if odd:
        name = odd[0]
        raise RequestError(
            f"it is not built like the VAEs of Flux and Stable Diffusion: {name} is "
            f"{_words(mine.get(name))}, not {_words(expected.get(name))}"
        )
    if any(width % GROUPS for width in dims.widths):
        raise RequestError(f"its widths {dims.widths} do not divide by {GROUPS}")
    return dims


def _measure(shapes: dict[str, tuple[int, ...]]) -> VaeDims:
    levels = _count(shapes, "decoder.up.")
    z_channels = shapes["decoder.conv_in.weight"][1]
    post_quant = "post_quant_conv.weight" in shapes
    return VaeDims(
        latent_channels=shapes["post_quant_conv.weight"][1] if post_quant else z_channels,
        z_channels=z_channels,
        out_channels=shapes["decoder.conv_out.weight"][0],
        widths=tuple(shapes[f"decoder.up.{level}.block.0.conv1.weight"][0] for level in range(levels)),
        resnets=_count(shapes, "decoder.up.0.block."),
        post_quant=post_quant,
    )


def _count(shapes: dict[str, tuple[int, ...]], prefix: str) -> int:
    """The number of numbered parts below `prefix`; 0 numbers give a KeyError like any other missing part."""
    numbers = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
    if not numbers:
        raise KeyError(prefix)
    return len(numbers)


def _words(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def ldm_shapes(dims: VaeDims) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder in ldm layout with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, out_channels: int, in_channels: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (out_channels, in_channels, kernel, kernel)
        shapes[f"{name}.bias"] = (out_channels,)

    def norm(name: str, channels: int) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (channels,)

    def resnet(name: str, in_channels: int, out_channels: int) -> None:
        norm(f"{name}.norm1", in_channels)
        conv(f"{name}.conv1", out_channels, in_channels, 3)
        norm(f"{name}.norm2", out_channels)
        conv(f"{name}.conv2", out_channels, out_channels, 3)
        if in_channels != out_channels:
            conv(f"{name}.nin_shortcut", out_channels, in_channels, 1)

    widest = dims.widths[-1]
    if dims.post_quant:
        conv("post_quant_conv", dims.z_channels, dims.latent_channels, 1)
    conv("decoder.conv_in", widest, dims.z_channels, 3)
    for block in ("decoder.mid.block_1", "decoder.mid.block_2"):
        resnet(block, widest, widest)
    norm("decoder.mid.attn_1.norm", widest)
    for projection in ("q", "k", "v", "proj_out"):
        conv(f"decoder.mid.attn_1.{projection}", widest, widest, 1)
    before = widest
    for level in reversed(range(len(dims.widths))):
        width = dims.widths[level]
        for n in range(dims.resnets):
            resnet(f"decoder.up.{level}.block.{n}", before, width)
            before = width
        if level:
            conv(f"decoder.up.{level}.upsample.conv", width, width, 3)
    norm("decoder.norm_out", dims.widths[0])
    conv("decoder.conv_out", dims.out_channels, dims.widths[0], 3)
    return shapes


def diffusers_names(dims: VaeDims) -> dict[str, str]:
    """ldm name -> name in diffusers' AutoencoderKL, of every tensor of the decoder.

    Shapes agree but for the attention's projections: 1x1 convolutions in ldm, linear layers in diffusers.
    """
    levels = len(dims.widths)
    modules = {"decoder.conv_in": "decoder.conv_in", "decoder.conv_out": "decoder.conv_out"}
    modules |= {"decoder.norm_out": "decoder.conv_norm_out", "post_quant_conv": "post_quant_conv"}
    resnets = {f"decoder.mid.block_{n + 1}": f"decoder.mid_block.resnets.{n}" for n in range(2)}
    for level in range(levels):
        target = f"decoder.up_blocks.{levels - 1 - level}"
        for block in range(dims.resnets):
            resnets[f"decoder.up.{level}.block.{block}"] = f"{target}.resnets.{block}"
        modules[f"decoder.up.{level}.upsample.conv"] = f"{target}.upsamplers.0.conv"
    for source, target in resnets.items():
        modules |= {f"{source}.{part}": f"{target}.{name}" for part, name in _RESNET.items()}
        modules[f"{source}.nin_shortcut"] = f"{target}.conv_shortcut"
    for part, name in _ATTENTION.items():
        modules[f"decoder.mid.attn_1.{part}"] = f"decoder.mid_block.attentions.0.{name}"
    names = {}
    for key in ldm_shapes(dims):
        module, parameter = key.rsplit(".", 1)
        names[key] = f"{modules[module]}.{parameter}"
    return names
