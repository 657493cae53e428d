"""Lists the layers of ComfyUI's UNet that look beyond one row, with their resolution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ....errors import RequestError
from .banded import reads_rows


@dataclass
class UNetLayers:
    """The layers of a UNet, each with its level: how often rows were halved before it, rounding up; `levels`: maximum.

    `normed_convolutions`: (group norm, the convolution of its output); between them zeros stay zeros. `attentions`:
    attend to the image's own tokens if called without a context; `self_attentions`: always do.
    """

    levels: int = 0
    convolutions: list[tuple[nn.Module, int]] = field(default_factory=list)
    norms: list[tuple[nn.Module, int]] = field(default_factory=list)
    normed_convolutions: list[tuple[nn.Module, nn.Module, int]] = field(default_factory=list)
    attentions: list[tuple[nn.Module, int]] = field(default_factory=list)
    self_attentions: list[tuple[nn.Module, int]] = field(default_factory=list)


def unet_layers(unet: Any) -> UNetLayers:
    """Lists the layers of a `UNetModel`. Raises RequestError for one that looks beyond its row in an unknown way."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, Upsample

    found, level = UNetLayers(), 0
    last = [getattr(unet, name) for name in ("out", "id_predictor") if hasattr(unet, name)]
    for block in (*unet.input_blocks, unet.middle_block or (), *unet.output_blocks):
        for layer in block:
            if isinstance(layer, Upsample):
                level -= 1
            _add(found, layer, level)
            if isinstance(layer, Downsample):
                level += 1
                found.levels = max(found.levels, level)
    for layer in last:
        _add(found, layer, level)
    if level or found.levels == 0:
        raise RequestError(f"a UNet that halves its rows {found.levels} times and leaves them at {level}")
    return found


def _add(found: UNetLayers, layer: nn.Module, level: int) -> None:
    """Adds the modules inside one layer of a block, which all have the same resolution."""
    paired: set[nn.Module] = set()
    for norm, convolution in _pairs(layer):
        found.normed_convolutions.append((norm, convolution, level))
        paired |= {norm, convolution}
    for name, part in layer.named_modules():
        if part in paired:
            continue
        if isinstance(part, nn.modules.conv._ConvNd):
            if not reads_rows(part, (1, 0, 1), (3, 1, 1), (3, 1, 2)):
                raise RequestError(f"the convolution {name} ({part})")
            found.convolutions.append((part, level))
        elif isinstance(part, nn.GroupNorm):
            found.norms.append((part, level))
        elif isinstance(part, (nn.modules.pooling._AvgPoolNd, nn.modules.pooling._MaxPoolNd)):
            raise RequestError(f"the pooling {name} ({part})")
    for attention, always in _attentions(layer):
        (found.self_attentions if always else found.attentions).append((attention, level))


def _pairs(layer: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    blocks = [part for part in layer.modules() if isinstance(part, ResBlock)]
    if any(block.updown for block in blocks):
        raise RequestError("blocks that change the resolution")
    ways = [block.in_layers for block in blocks]
    # A scale-shift norm adds to the norm's output, so zeros would not stay zeros.
    ways += [block.out_layers for block in blocks if not block.use_scale_shift_norm]
    if isinstance(layer, nn.Sequential):
        ways.append(layer)
    for norm, *others, convolution in map(list, ways):
        zero_stays = all(isinstance(other, (nn.SiLU, nn.Dropout)) for other in others)
        convolves = isinstance(convolution, nn.modules.conv._ConvNd) and reads_rows(convolution, (3, 1, 1))
        if zero_stays and isinstance(norm, nn.GroupNorm) and convolves:
            yield norm, convolution


def _attentions(layer: nn.Module) -> Iterable[tuple[nn.Module, bool]]:
    """Yields (attention, True if it always attends to the image's own tokens). A video's attention over time is left
    out: it looks at one position of the image."""
    from comfy.ldm.modules.attention import SpatialTransformer

    if isinstance(layer, SpatialTransformer):
        for block in layer.transformer_blocks:
            yield from ((block.attn1, not block.disable_self_attn), (block.attn2, False))
