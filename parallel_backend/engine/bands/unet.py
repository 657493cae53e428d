"""One call of ComfyUI's UNet by all ranks of an axis; each rank computes a band of the image's rows.

During a call ComfyUI's own layers have the classes below, so no forward is copied. Bands begin at rows of the lowest
resolution, so they halve and double without remainder. The last band takes any odd rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...layout import slice_of, split_sizes
from ...models.attention import Attend, AttentionCall, attention_by
from ...models.base import ModuleModel
from ...models.comfyui.rows.unet_layers import UNetLayers, unet_layers
from ...requests import ModuleCall
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from .row_bands import BandConv, BandGroupNorm, Bands, to_banded

_BYTES = torch.uint8


class BandNormForConv(BandGroupNorm):
    """A group norm before a convolution: its output has one row more above and below, zero at the image's border.

    The neighbours' rows are sent before they are normed, with each band's moments: one exchange serves both layers.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Norms [B, C, ..., rows, W] and returns [B, C, ..., rows + 2, W]."""
        axis = self.bands.axis
        moments, borders = self._moments(x), torch.stack([x[..., 0, :], x[..., -1, :]])
        sent = torch.cat([moments.flatten().view(_BYTES), borders.flatten().view(_BYTES)])
        arrived = all_gather(sent[None], (1,) * axis.size, axis)
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
    """A convolution over this rank's rows; its input has one row more above and below."""

    def _conv_forward(self, x: Tensor, *weights: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """Computes [B, out, ..., rows, W] from [B, C, ..., rows + 2, W]."""
        padding: Any = self.padding
        self.padding = (*padding[:-2], 0, padding[-1])
        try:
            return super()._conv_forward(x, *weights, **options)
        finally:
            self.padding = padding


class BandAttention(nn.Module):
    """ComfyUI's cross-attention: when it attends to the image's own tokens, its keys come from all bands."""

    bands: Bands

    def forward(self, x: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Attends from x [B, tokens of this band, C]; returns the same shape."""
        if context is not None:
            return super().forward(x, context, *args, **kwargs)
        with attention_by(self._attend):
            return super().forward(x, context, *args, **kwargs)

    def _attend(self, library: Attend, call: AttentionCall) -> Tensor:
        """Gathers keys and values [B, tokens of this band, H D] in one collective. An attention.Replacement."""
        mine = torch.cat([call.k, call.v], dim=2)
        sizes = self.bands.sizes(mine.shape[1])
        everyones = all_gather(mine, sizes, self.bands.axis, 1)
        keys, values = everyones.split([call.k.shape[2], call.v.shape[2]], dim=2)
        return library(replace(call, k=keys, v=values))


class BandSelfAttention(BandAttention):
    """Attention to the image's own tokens only, which a patch may have replaced for keys and values (`context`)."""

    def forward(self, x: Tensor, context: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        with attention_by(self._attend):
            return super(BandAttention, self).forward(x, context, *args, **kwargs)


class UNetBands:
    """A UNet whose rows are shared out over the sequence axis of `layout`. Raises RequestError if no rule covers one of
    its layers."""

    def __init__(self, model: ModuleModel, layout: Layout) -> None:
        self._module = model.module
        self._axis, self._shares = layout.sequence, layout.sequence_shares
        self._device = model.device
        found = unet_layers(model.module)
        self._levels = [Bands() for _ in range(found.levels + 1)]
        self._layers = list(self._banded(found))
        self._shared_out: dict[int, list[slice]] = {}  # by height of the image; only the height in use

    def _banded(self, found: UNetLayers) -> Iterator[tuple[nn.Module, type[nn.Module], Bands]]:
        """Yields (layer, its class in bands, its bands)."""
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
            if pair not in made:  # a subclass of its own class, for code that checks
                made[pair] = type(f"{kind.__name__}Of{pair[1].__name__}", pair, {})
            yield layer, made[pair], self._levels[level]

    def refusal(self, call: ModuleCall) -> str:
        """Returns why bands cannot compute this call, worded for users; empty if they can. The same on all ranks."""
        latent = call.args[0]
        if not isinstance(latent, Tensor) or latent.ndim != 4:
            return "this latent is no image"
        lowest = self._heights(latent.shape[-2])[-1]
        if 0 in split_sizes(lowest, self._axis.size, self._shares):
            return (
                f"this image has {lowest} row{'s' * (lowest > 1)} at the lowest resolution of its UNet, too few for "
                f"bands on {self._axis.size} devices"
            )
        return ""

    def __call__(self, call: ModuleCall) -> Tensor:
        """Returns the whole answer on each rank. Collective over the sequence axis."""
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
        """Returns the height of the whole image at each resolution."""
        return [-(-height // 2**level) for level in range(len(self._levels))]

    def _share_out(self, heights: list[int]) -> list[slice]:
        """Sets the rows of all ranks at each resolution; returns this rank's."""
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
        """Makes the module's layers work on bands inside the context."""
        local = [type(layer) for layer, _, _ in self._layers]
        try:
            for layer, kind, bands in self._layers:
                to_banded(layer, kind, bands)
            yield
        finally:
            for (layer, *_), kind in zip(self._layers, local, strict=True):
                layer.__class__ = kind
                vars(layer).pop("bands", None)


def _cut(residual: Tensor | None, rows: dict[int, slice]) -> Tensor | None:
    """Returns this rank's rows of a ControlNet's residual [B, C, h, w], or all of it if h is 1. Returns None for
    a height that the image has at no resolution: ComfyUI would leave out such a residual as well."""
    if residual is None or residual.ndim != 4 or residual.shape[-2] == 1:
        return residual
    return residual[..., rows[residual.shape[-2]], :] if residual.shape[-2] in rows else None
