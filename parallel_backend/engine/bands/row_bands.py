"""Bands: each rank computes some rows of one image, and layers that need other rows get them from the other ranks.

Three kinds of layer need other rows: convolutions, group norms and attention. All others work row by row. ComfyUI's own
layers are turned into these classes in place (`split_rows`), so no forward is copied. Rows are the last dimension but
one, in images [B, C, H, W] and videos [B, C, T, H, W]. All dimensions before the rows are whole on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ...errors import RequestError
from ...models.comfyui.rows.banded import RowAttention, RowSpan, reads_rows
from ...wire.heartbeat import heartbeat
from ..comm.collectives import all_gather
from ..comm.groups import ALONE, Axis

# A group norm reads its input in up to 8 slices of at least this many elements, so that torch's scratch memory and the
# float32 copy of a 16-bit input stay smaller than the input. For small inputs more launches do not pay.
SLICE_ELEMENTS = 2**22


class Bands:
    """The rows that each rank holds. `axis`: the ranks that hold any, from top to bottom; `rows`: latent rows per rank.

    Inside the network every rank has the same multiple of its latent rows, so a layer only needs the proportions.
    """

    def __init__(self) -> None:
        self.share_out(ALONE, (1,), torch.device("cpu"))

    def share_out(self, axis: Axis, rows: tuple[int, ...], device: torch.device) -> None:
        """Sets the ranks and the number of rows of each from now on."""
        self.axis, self.rows = axis, rows
        # Each band's part of the image, [ranks, 1, 1]: its weight in a group's mean. Made on the device, because a copy
        # to it would make the host wait.
        parts = (torch.full((1, 1, 1), row / sum(rows), dtype=torch.float64, device=device) for row in rows)
        self.parts = torch.cat(list(parts))

    def sizes(self, mine: int) -> tuple[int, ...]:
        """Returns the size of each rank's part of something proportional to rows. `mine`: this rank's size."""
        local = self.rows[self.axis.index]
        return tuple(mine * rows // local for rows in self.rows)

    def span(self, mine: int) -> tuple[tuple[int, ...], int]:
        """Returns (the rows of each rank, this rank's index) if this rank has `mine` rows; see RowSpan.span."""
        return self.sizes(mine), self.axis.index

    def start_halo(
        self, x: Tensor, *, above: bool = True, below: bool = True
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """Starts to swap border rows of x [..., rows, W] with the neighbours; returns a function that waits.

        That function returns the rows (above, below), [..., 1, W] each. A row is None at the image's border, and on a
        side that was not requested. All ranks pass the same `above` and `below`.
        """
        axis, operations = self.axis, []
        received: list[Tensor | None] = []
        ways = (  # (neighbour, its border row here, True to send, True to receive)
            (axis.index - 1, x[..., :1, :], below, above),
            (axis.index + 1, x[..., -1:, :], above, below),
        )
        for neighbour, border, sends, receives in ways:
            received.append(None)
            if not 0 <= neighbour < axis.size:
                continue
            peer = axis.ranks[neighbour]
            if sends:
                sent = border.contiguous()
                axis.traffic.add(sent.numel(), sent)
                operations.append(dist.P2POp(dist.isend, sent, peer, axis.group))
            if receives:
                arriving = received[-1] = torch.empty_like(border, memory_format=torch.contiguous_format)
                operations.append(dist.P2POp(dist.irecv, arriving, peer, axis.group))
        works = dist.batch_isend_irecv(operations)
        neighbours = axis.ranks[max(axis.index - 1, 0) : axis.index + 2]

        def wait() -> tuple[Tensor | None, Tensor | None]:
            with heartbeat.inside("an exchange of edge rows", neighbours):
                for work in works:
                    work.wait()
            operations.clear()  # kept until here: tensors must stay alive while they are sent
            return received[0], received[1]

        return wait

    def gather(self, mine: Tensor) -> Tensor:
        """Gathers [..., rows, W] of each rank into [..., all rows, W] on every rank."""
        return all_gather(mine, self.sizes(mine.shape[-2]), self.axis, -2)


class BandConv(_ConvNd):
    """A convolution over this rank's rows that reads one row above and below, and any columns and frames.

    With a stride of 2 bands begin at even rows, so no band reads the row below it, unless its caller pads the bottom
    only. Rows inside the band are computed while the neighbours' border rows travel. Then the first and the last row
    are computed from three rows each; the band is not copied with its halo. This class comes before the layer's own
    class, which computes each piece.
    """

    bands: Bands

    def _conv_forward(self, x: Tensor, *weights: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """Computes [B, out, ..., rows / stride, W] from [B, C, ..., rows, W]. If the caller has padded x, it has
        rows + 2; with a stride of 2 it may have rows + 1, padded at the bottom only."""
        compute: Callable[..., Tensor] = functools.partial(super()._conv_forward, **options)
        if self.kernel_size[-2] == 1 or self.bands.axis.size == 1:
            return compute(x, *weights)
        if self.padding[-2] == 0:
            return compute(self._with_halo(x), *weights)
        if self.padding_mode != "zeros":
            return self._padded_by_mode(compute, x, weights)
        wait = self.bands.start_halo(x, below=self.stride[-2] == 1)
        rows = x.shape[-2]
        # The first and last row are right only at the image's border; otherwise they are replaced below.
        out = compute(x, *weights) if rows > 2 else None
        above, below = wait()
        padding: Any = self.padding
        self.padding = (*padding[:-2], 0, padding[-1])
        try:
            if out is None:
                border = x.new_zeros(*x.shape[:-2], 1, x.shape[-1])
                top, bottom = (border if row is None else row for row in (above, below))
                return compute(torch.cat([top, x, bottom], dim=-2), *weights)
            if above is not None:
                out[..., :1, :] = compute(torch.cat([above, x[..., :2, :]], dim=-2), *weights)
            if below is not None:
                out[..., -1:, :] = compute(torch.cat([x[..., -2:, :], below], dim=-2), *weights)
            return out
        finally:
            self.padding = padding

    def _padded_by_mode(self, compute: Callable[..., Tensor], x: Tensor, weights: tuple[Any, ...]) -> Tensor:
        """Pads x with the neighbours' rows, or by the padding mode at the image's border, and computes that."""
        padding, mode = self.padding, self.padding_mode
        sides = list(self._reversed_padding_repeated_twice)
        columns = [*sides[:2], 0, 0, *sides[4:]]
        wait = self.bands.start_halo(x)
        if mode == "reflect" and x.shape[-2] == 1:  # the row to reflect is a neighbour's
            rows = [row for row in wait() if row is not None]
            padded = F.pad(torch.cat([rows[0], x, rows[-1]], dim=-2), columns, mode)
        else:
            padded = F.pad(x, sides, mode)
            above, below = wait()
            if above is not None:
                padded[..., :1, :] = F.pad(above, columns, mode)
            if below is not None:
                padded[..., -1:, :] = F.pad(below, columns, mode)
        unpadded: Any = (0,) * len(padding)
        self.padding, self.padding_mode = unpadded, "zeros"
        try:
            return compute(padded, *weights)
        finally:
            self.padding, self.padding_mode = padding, mode

    def _with_halo(self, x: Tensor) -> Tensor:
        """Replaces the outermost rows of x, the caller's padding, by the neighbours' rows at a border of two bands."""
        halves = self.stride[-2] == 2
        # Bands to be halved have an even number of rows. One padded row more is at the bottom, and is read. Of two more
        # only the one above is read.
        first = 0 if halves and x.shape[-2] % 2 else 1
        wait = self.bands.start_halo(x[..., first:-1, :], above=first == 1, below=not (halves and first))
        above, below = wait()
        if above is not None:
            x[..., :1, :] = above
        if below is not None:
            x[..., -1:, :] = below
        return x


class BandGroupNorm(nn.GroupNorm):
    """Group norm with the statistics of the whole image, from one exchange of each band's mean and variance.

    Merged as in Chan, Golub and LeVeque 1979 (eq. 2.1). That subtracts no large sums from each other, so it is as exact
    as one pass over the whole image.
    """

    bands: Bands

    def forward(self, x: Tensor) -> Tensor:
        """Norms [B, C, ..., rows, W], or tokens [B, C, rows * W], in the same shape."""
        if self.bands.axis.size == 1:
            return super().forward(x)
        axis = self.bands.axis
        mine = self._moments(x)
        moments = all_gather(mine[None], (1,) * axis.size, axis)
        return self._normed(x, *self._full_affine(moments, x), torch.empty_like(x))

    def _moments(self, x: Tensor) -> Tensor:
        """Returns mean and variance of this band, [2, B, groups] float32, by torch's own group norm kernel."""
        batch, channels = x.shape[:2]
        each = channels // self.num_groups
        slices = min(8, self.num_groups, max(1, x.numel() // SLICE_ELEMENTS))
        means, variances = [], []
        for part in x.split(each * -(-self.num_groups // slices), dim=1):
            part = part.float().contiguous()
            here = part.shape[1] // each
            per_image = part[0].numel() // part.shape[1]
            _, mean, rstd = torch.native_group_norm(
                part, None, None, batch, part.shape[1], per_image, here, eps=0.0
            )
            means.append(mean.view(batch, here))
            variances.append(rstd.view(batch, here) ** -2)
        return torch.stack([torch.cat(means, dim=1), torch.cat(variances, dim=1)]).float()

    def _full_affine(self, moments: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns scale and shift [B, C, 1, …] of the norm, from the moments of all bands [ranks, 2, B, groups]."""
        mean, var = moments.double().unbind(1)
        parts = self.bands.parts
        whole = (parts * mean).sum(0)
        spread = (parts * (var + (mean - whole) ** 2)).sum(0)
        each, rstd = x.shape[1] // self.num_groups, (spread + self.eps).rsqrt()
        center, scale = (moment.repeat_interleave(each, dim=1) for moment in (whole, rstd))
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -center * scale
        if self.bias is not None:
            shift = shift + self.bias.double()
        ones = (1,) * (x.ndim - 2)
        return scale.float().view(*scale.shape, *ones), shift.float().view(*shift.shape, *ones)

    @staticmethod
    def _normed(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Computes x * scale + shift into `out` in float32, rounded once, as torch's own kernel does."""
        return torch.addcmul(shift, x, scale, out=out)


def split_rows(network: nn.Module, bands: Bands) -> None:
    """Turns the layers of `network` (convolutions, group norms, self-attention) into layers over this rank's rows.

    Raises RequestError for a convolution that reads other rows in an unknown way.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            # Its own row, or one above and below; with a stride of 2 its caller pads.
            ways, modes = ((1, 0, 1), (3, 0, 1), (3, 1, 1), (3, 0, 2)), ("zeros", "replicate", "reflect")
            if not reads_rows(layer, *ways, padding_modes=modes):
                raise RequestError(f"the convolution {name} ({layer}) cannot be split into bands")
            kind = type(layer)  # a subclass of it, for networks that check the class
            to_banded(layer, type(f"Band{kind.__name__}", (BandConv, kind), {}), bands)
        elif isinstance(layer, nn.GroupNorm):
            to_banded(layer, _banded_norm(type(layer)), bands)
        elif isinstance(layer, RowAttention):
            layer.gather = bands.gather
        elif isinstance(layer, RowSpan):
            layer.span = bands.span


def to_banded(layer: nn.Module, kind: type[nn.Module], bands: Bands) -> None:
    """Gives a layer the class `kind`, which works on `bands`."""
    layer.__class__ = kind
    vars(layer)["bands"] = bands


def _banded_norm(kind: type[nn.GroupNorm]) -> type[nn.Module]:
    """Returns BandGroupNorm, under a network's own subclass that splits frames before it norms them."""
    parent = kind.__mro__[1]
    if "forward" in vars(kind) and parent is not nn.GroupNorm and issubclass(parent, nn.GroupNorm):
        return type(f"Band{kind.__name__}", (kind, BandGroupNorm), {})
    return BandGroupNorm
