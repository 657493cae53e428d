"""One call of ComfyUI's UNet by all ranks of an axis, each of which computes a band of the image's rows.

The layers are ComfyUI's own, which for the time of a call are of the classes below: no forward is copied. Bands begin
where the lowest resolution has a row, so that they halve and double without remainder; the last one takes what is odd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...layout import slice_of, split_sizes
from ...models.attention import attention_by
from ...models.base import ModuleModel
from ...models.comfyui.rows.unet_layers import UNetLayers, unet_layers
from ...requests import ModuleCall
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from .row_bands import BandConv, BandGroupNorm, Bands

_BYTES = torch.uint8
_OPTIONS = "transformer_options"
# What nodes put between or into blocks.
_LOOKING = ("optimized_attention_override", "patches", "patches_replace")
_MAY_LOOK = "a patch of this model's blocks (such as IP-Adapter's) may look at the whole image"


class BandNormForConv(BandGroupNorm):
    """A group norm whose output a convolution takes: with one row more above and below, zero at the image's border.

    The neighbours' rows travel before they are normed, beside each band's moments: one exchange serves both layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, ..., rows, W] -> [B, C, ..., rows + 2, W]."""
        axis, traffic = self.bands.axis, self.bands.traffic
        moments, borders = self._moments(x), torch.stack([x[..., 0, :], x[..., -1, :]])
        sent = torch.cat([moments.flatten().view(_BYTES), borders.flatten().view(_BYTES)])
        arrived = all_gather(sent[None], (1,) * axis.size, axis, traffic)
        of_all, of_rows = arrived.split([moments.nbytes, borders.nbytes], dim=1)
        all_moments = of_all.contiguous().view(torch.float32).view(axis.size, *moments.shape)
        scale, shift = self._full_affine(all_moments, x)
        out = x.new_empty(*x.shape[:-2], x.shape[-2] + 2, x.shape[-1])
        self._normed(x, scale, shift, out[..., 1:-1, :])
        for neighbour, border, row in (
            (axis.index - 1, 1, out[..., :1, :]),
            (axis.index + 1, 0, out[..., -1:, :]),
        ):
            if 0 <= neighbour < axis.size:
                theirs = of_rows[neighbour].clone().view(x.dtype).view(borders.shape)[border]
                self._normed(theirs.unsqueeze(-2), scale, shift, row)
            else:
                row.zero_()
        return out


class ConvOfHalo(_ConvNd):
    """A convolution over this rank's rows, which come with one more above and below."""

    def _conv_forward(self, x: Tensor, *weights: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """[B, C, ..., rows + 2, W] -> [B, out, ..., rows, W]."""
        padding: Any = self.padding
        self.padding = (*padding[:-2], 0, padding[-1])
        try:
            return super()._conv_forward(x, *weights, **options)
        finally:
            self.padding = padding


class BandAttention(nn.Module):
    """ComfyUI's cross-attention: where it attends to the image's own tokens, those of all bands are its keys."""

    bands: Bands

    def forward(self, x: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """x [B, own tokens, C]; the same shape."""
        if context is not None:
            return super().forward(x, context, *args, **kwargs)
        with attention_by(self._attend):
            return super().forward(x, context, *args, **kwargs)

    def _attend(
        self, original: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **others: Any
    ) -> Tensor:
        """base.AttentionCall. Keys and values [B, own tokens, H D] travel together."""
        mine = torch.cat([k, v], dim=2).transpose(0, 1)
        sizes = self.bands.sizes(len(mine))
        everyones = all_gather(mine, sizes, self.bands.axis, self.bands.traffic).transpose(0, 1)
        keys, values = everyones.split([k.shape[2], v.shape[2]], dim=2)
        return original(q, keys, values, *args, **others)


class BandSelfAttention(BandAttention):
    """The same to the image's own tokens alone, which a patch may have changed on their way to keys and values."""

    def forward(self, x: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        with attention_by(self._attend):
            return super(BandAttention, self).forward(x, context, *args, **kwargs)


class UNetBands:
    """Of a UNet whose rows are shared out over the sequence axis of `layout`. Raises RequestError for one that has
    layers which no rule covers."""

    def __init__(self, model: ModuleModel, layout: Layout, traffic: Traffic) -> None:
        self._module = model.module
        self._axis, self._shares = layout.sequence, layout.sequence_shares
        self._device = model.device
        found = unet_layers(model.module)
        self._levels = [Bands(traffic) for _ in range(found.levels + 1)]
        self._layers = list(self._banded(found))
        self._shared_out: dict[int, list[slice]] = {}  # of the height that the levels are set to

    def _banded(self, found: UNetLayers) -> Iterator[tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
        """(layer, its class in bands, attributes that it then has)."""
        kinds: list[tuple[type[nn.Module], nn.Module, int]] = []
        kinds += [(BandConv, layer, level) for layer, level in found.convolutions]
        kinds += [(BandGroupNorm, layer, level) for layer, level in found.norms]
        kinds += [(BandAttention, layer, level) for layer, level in found.attentions]
        kinds += [(BandSelfAttention, layer, level) for layer, level in found.self_attentions]
        for norm, convolution, level in found.normed_convolutions:
            kinds += [(BandNormForConv, norm, level), (ConvOfHalo, convolution, level)]
        made: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
        for kind, layer, level in kinds:
            pair = kind, type(layer)
            if pair not in made:  # still of its own class, for code that asks
                made[pair] = type(f"{kind.__name__}Of{pair[1].__name__}", pair, {})
            yield layer, made[pair], {"bands": self._levels[level]}

    def refusal(self, call: ModuleCall) -> str:
        """Why this call cannot be computed in bands, in words; alike on all ranks. Empty where it can."""
        latent = call.args[0]
        if not isinstance(latent, Tensor) or latent.ndim != 4:
            return "this latent is no image"
        options = call.kwargs.get(_OPTIONS) or {}
        if any(options.get(name) for name in _LOOKING):
            return _MAY_LOOK
        lowest = self._heights(latent.shape[-2])[-1]
        if 0 in split_sizes(lowest, self._axis.size, self._shares):
            return (
                f"this image has {lowest} row{'s' * (lowest > 1)} at the lowest resolution of its UNet, too few for "
                f"bands on {self._axis.size} devices"
            )
        return ""

    def __call__(self, call: ModuleCall) -> Tensor:
        """The whole answer, on each rank. Collective over the sequence axis."""
        latent, *others = call.args
        heights = self._heights(latent.shape[-2])
        if heights[0] not in self._shared_out:
            self._shared_out = {heights[0]: self._share_out(heights)}
        rows = self._shared_out[heights[0]]
        kwargs = dict(call.kwargs)
        if isinstance(control := kwargs.get("control"), dict):
            cut = dict(zip(heights, rows, strict=True))
            kwargs["control"] = {
                name: [_cut(r, cut) for r in residuals] for name, residuals in control.items()
            }
        band = latent[..., rows[0], :].contiguous()
        with self._in_bands():
            answer = self._module(band, *others, **kwargs)
        return self._levels[0].gather(answer).contiguous()

    def _heights(self, height: int) -> list[int]:
        """Of the whole image at each resolution."""
        heights = [height]
        for _ in self._levels[1:]:
            heights.append(-(-heights[-1] // 2))
        return heights

    def _share_out(self, heights: list[int]) -> list[slice]:
        """This rank's rows at each resolution."""
        of_ranks = split_sizes(heights[-1], self._axis.size, self._shares)
        local = []
        for level, (height, bands) in enumerate(zip(heights, self._levels, strict=True)):
            doubled = 2 ** (len(heights) - 1 - level)
            *others, _ = (doubled * rows for rows in of_ranks)
            sizes = (*others, height - sum(others))
            bands.share_out(self._axis, sizes, self._device)
            local.append(slice_of(sizes, self._axis.index))
        return local

    @contextmanager
    def _in_bands(self) -> Iterator[None]:
        """Inside, the module's layers work on bands."""
        local = [type(layer) for layer, _, _ in self._layers]
        try:
            for layer, kind, attributes in self._layers:
                layer.__class__ = kind
                vars(layer).update(attributes)
            yield
        finally:
            for (layer, _, attributes), kind in zip(self._layers, local, strict=True):
                layer.__class__ = kind
                for name in attributes:
                    vars(layer).pop(name, None)


def _cut(residual: Tensor | None, rows: dict[int, slice]) -> Tensor | None:
    """This rank's rows of a ControlNet's residual [B, C, h, w]; one of no height of this image is one that ComfyUI
    would leave out as well, but for what is the same everywhere."""
    if residual is None or residual.ndim != 4 or residual.shape[-2] == 1:
        return residual
    return residual[..., rows[residual.shape[-2]], :] if residual.shape[-2] in rows else None
