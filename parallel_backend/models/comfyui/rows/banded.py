"""Modules that are put into a VAE's network when ranks decode or encode with it in bands of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

# Progress steps of one decode or encode, whatever its length: enough to interrupt it within a second or two.
STEPS = 32
OTHER_VERSION = "this version of ComfyUI computes its VAE in another way than the pack knows"


def reads_rows(
    convolution: _ConvNd, *ways: tuple[int, int, int], padding_modes: tuple[str, ...] = ("zeros",)
) -> bool:
    """Returns True if a convolution reads neighbouring rows in one of the `ways` (kernel, padding, stride)."""
    rows = convolution.kernel_size[-2], convolution.padding[-2], convolution.stride[-2]
    return rows in ways and convolution.dilation[-2] == 1 and convolution.padding_mode in padding_modes


class RowSpan(nn.Module):
    """Tells a network which of an image's rows it computes. `span`: its own number of rows -> (rows of each rank, its
    index among them)."""

    span: Callable[[int], tuple[tuple[int, ...], int]] = staticmethod(lambda mine: ((mine,), 0))


class RowAttention(nn.Module):
    """Attention from the positions in this rank's rows to all rows. `gather`: [..., rows, W] -> [..., H, W]."""

    gather: Callable[[Tensor], Tensor] = staticmethod(lambda mine: mine)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns [B, C, ..., rows, W] of queries, keys and values of that shape, with one head."""
        q, k, v = (
            x.flatten(2).transpose(1, 2)[:, None] for x in (query, self.gather(key), self.gather(value))
        )
        return F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(query.shape)
