"""Bands: each rank computes some rows of one image, and layers that look beyond them ask the ranks that hold the rest.

Three kinds of layer do, in a decoder or encoder of convolutions; everything else works row by row. The layers are
ComfyUI's own, turned into these classes in place (`split_rows`), so that no forward is copied. Rows are
the last dimension but one, of images [B, C, H, W] and of videos [B, C, T, H, W]: what lies before is whole on every
rank.
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
from ...models.comfyui.rows.banded import RowAttention, RowSpan
from ...wire.heartbeat import heartbeat
from ..comm.collectives import all_gather
from ..comm.groups import Axis
from ..comm.traffic_counter import Traffic

# A group norm looks at its input in up to 8 slices of at least this many elements, so that neither torch's scratch nor,
# in half precision, a copy in float32 is as large as the input. Small inputs are worth no further launches.
SLICE_ELEMENTS = 2**22


class Bands:
    """The rows that each rank holds. `axis`: the ranks that hold any, from top to bottom; `rows`: latent rows of each.

    Deeper layers have `scale` times the rows, everywhere alike, so that proportions are all that a layer needs.
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.share_out(Axis((0,), 0, None), (1,), torch.device("cpu"))

    def share_out(self, axis: Axis, rows: tuple[int, ...], device: torch.device) -> None:
        """Sets who holds which rows from now on."""
        self.axis, self.rows = axis, rows
        # Each band's part of the image, [ranks, 1, 1]: its weight in the mean of a group. Made on the device: a copy
        # to it would hold the host up.
        parts = (torch.full((1, 1, 1), row / sum(rows), dtype=torch.float64, device=device) for row in rows)
        self.parts = torch.cat(list(parts))

    def sizes(self, mine: int) -> tuple[int, ...]:
        """Each rank's part of what is proportional to rows, when this rank has `mine`."""
        local = self.rows[self.axis.index]
        return tuple(mine * rows // local for rows in self.rows)

    def span(self, mine: int) -> tuple[tuple[int, ...], int]:
        """base.RowSpan's."""
        return self.sizes(mine), self.axis.index

    def start_halo(
        self, x: Tensor, *, above: bool = True, below: bool = True
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """Swaps border rows of x [..., rows, W] with the neighbours; call the result to wait for (above, below).

        Each is [..., 1, W]; None at the image's own border, and on a side where nobody asks for it.
        """
        axis, operations = self.axis, []
        received: list[Tensor | None] = []
        ways = (  # (whose, is it sent what, is it waited for)
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
                self.traffic.add(sent.numel(), sent)
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
            operations.clear()  # held until here: what they send must outlive the sending
            return received[0], received[1]

        return wait

    def gather(self, mine: Tensor) -> Tensor:
        """[..., rows, W] of each rank -> [..., all rows, W] on every rank."""
        if self.axis.size == 1:
            return mine
        rows = mine.movedim(-2, 0)
        return all_gather(rows, self.sizes(len(rows)), self.axis, self.traffic).movedim(0, -2)


class BandConv(_ConvNd):
    """A convolution over this rank's rows that looks at one row above and below, and any columns and frames.

    With a stride of 2 bands begin at even rows, so that none looks below itself. Rows inside the band are computed
    while the neighbours' border rows travel; the first and the last row are then computed from three rows each. No copy
    of the band with its halo is made. Stands before the layer's own class, which computes each piece.
    """

    bands: Bands

    def _conv_forward(self, x: Tensor, *weights: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """[B, C, ..., rows, W] -> [B, out, ..., rows / stride, W]. Where the caller has padded them, rows + 2, or + 1
        below for a stride of 2."""
        compute: Callable[..., Tensor] = functools.partial(super()._conv_forward, **options)
        if self.kernel_size[-2] == 1 or self.bands.axis.size == 1:
            return compute(x, *weights)
        if self.padding[-2] == 0:
            return compute(self._with_halo(x), *weights)
        if self.padding_mode != "zeros":
            return self._padded_by_mode(compute, x, weights)
        wait = self.bands.start_halo(x, below=self.stride[-2] == 1)
        rows = x.shape[-2]
        # Its first and last row are only right at the image's own border; the others are replaced below.
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
        """The rows above and below a band's own are the neighbours', and at the image's border what the mode makes."""
        padding, mode = self.padding, self.padding_mode
        sides = list(self._reversed_padding_repeated_twice)
        columns = [*sides[:2], 0, 0, *sides[4:]]
        wait = self.bands.start_halo(x)
        if mode == "reflect" and x.shape[-2] == 1:  # the row that is reflected is a neighbour's
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
        """x with its outermost rows, which the caller made up, replaced by the neighbours' at a border of two bands."""
        halves = self.stride[-2] == 2
        # Of an even number of rows, as halved ones are, one more is a row below alone, which is then looked at; of two
        # more only the one above is.
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

    Merged as in Chan, Golub and LeVeque 1979 (eq. 2.1): no difference of large sums, so that it is as exact as one pass
    over the whole image.
    """

    bands: Bands

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, ..., rows, W], or tokens [B, C, rows * W]; the same shape."""
        if self.bands.axis.size == 1:
            return super().forward(x)
        axis = self.bands.axis
        mine = self._moments(x)
        moments = all_gather(mine[None], (1,) * axis.size, axis, self.bands.traffic)
        return self._normed(x, *self._full_affine(moments, x), torch.empty_like(x))

    def _moments(self, x: Tensor) -> Tensor:
        """[2, B, groups] float32: mean and variance of this band."""
        return torch.stack(_moments(x, self.num_groups))

    def _full_affine(self, moments: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm as x * scale + shift, from the moments of all bands [ranks, 2, B, groups]: [B, C, 1, …] each."""
        mean, var = moments.double().unbind(1)
        parts = self.bands.parts
        whole = (parts * mean).sum(0)
        spread = (parts * (var + (mean - whole) ** 2)).sum(0)
        scale, shift = self._affine(whole, (spread + self.eps).rsqrt(), x.shape[1])
        ones = (1,) * (x.ndim - 2)
        return scale.view(*scale.shape, *ones), shift.view(*shift.shape, *ones)

    @staticmethod
    def _normed(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> Tensor:
        """Computed in float32, as torch's own kernel does, and rounded once."""
        return torch.addcmul(shift, x, scale, out=out)

    def _affine(self, mean: Tensor, rstd: Tensor, channels: int) -> tuple[Tensor, Tensor]:
        """The norm as x * scale + shift: [B, C] float32 each, from [B, groups]."""
        each = channels // self.num_groups
        mean, scale = (moment.repeat_interleave(each, dim=1) for moment in (mean, rstd))
        if self.weight is not None:
            scale = scale * self.weight.double()
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias.double()
        return scale.float(), shift.float()


def _moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance per image and group, [B, groups] float32, by torch's own group norm kernel."""
    batch, channels = x.shape[:2]
    each = channels // groups
    slices = min(8, groups, max(1, x.numel() // SLICE_ELEMENTS))
    means, variances = [], []
    for part in x.split(each * -(-groups // slices), dim=1):
        part = part.float().contiguous()
        here = part.shape[1] // each
        per_image = part[0].numel() // part.shape[1]
        _, mean, rstd = torch.native_group_norm(
            part, None, None, batch, part.shape[1], per_image, here, eps=0.0
        )
        means.append(mean.view(batch, here))
        variances.append(rstd.view(batch, here) ** -2)
    return torch.cat(means, dim=1).float(), torch.cat(variances, dim=1).float()


def split_rows(network: nn.Module, bands: Bands) -> None:
    """Has every layer of `network` (convolutions, group norms, self-attention) work on this rank's rows.

    Raises RequestError for a layer that looks at other rows in a way not known here.
    """
    for name, layer in list(network.named_modules()):
        if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
            if not _is_simple(layer):
                raise RequestError(f"the convolution {name} ({layer}) cannot be split into bands")
            become(layer, banded(type(layer)), bands)
        elif isinstance(layer, nn.GroupNorm):
            become(layer, _banded_norm(type(layer)), bands)
        elif isinstance(layer, RowAttention):
            layer.gather = bands.gather
        elif isinstance(layer, RowSpan):
            layer.span = bands.span


def become(layer: nn.Module, kind: type[nn.Module], bands: Bands) -> None:
    layer.__class__ = kind
    vars(layer)["bands"] = bands


def banded(kind: type[_ConvNd]) -> type[nn.Module]:
    """`kind` over bands: still of that class, for a network that asks."""
    return type(f"Band{kind.__name__}", (BandConv, kind), {})


def _is_simple(conv: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether it looks at no row but its own, or at one above and one below; where it halves rows, its caller pads."""
    rows = conv.kernel_size[-2], conv.padding[-2], conv.stride[-2]
    plain = conv.dilation[-2] == 1 and conv.padding_mode in ("zeros", "replicate", "reflect")
    return plain and rows in ((1, 0, 1), (3, 0, 1), (3, 1, 1), (3, 0, 2))


def _banded_norm(kind: type[nn.GroupNorm]) -> type[nn.Module]:
    """BandGroupNorm; below the forward of a class of a network's own, which takes frames apart before it norms them."""
    parent = kind.__mro__[1]
    if "forward" in vars(kind) and parent is not nn.GroupNorm and issubclass(parent, nn.GroupNorm):
        return type(f"Band{kind.__name__}", (kind, BandGroupNorm), {})
    return BandGroupNorm
