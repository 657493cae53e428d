"""Parts that a VAE's network has where ranks decode or encode with it together."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

# A decode or encode of one picture or video is counted in as many steps, whatever its length: enough to be interrupted
# within a second or two.
STEPS = 32
OTHER_VERSION = "this version of ComfyUI computes its VAE in another way than the pack knows"


class RowSpan(nn.Module):
    """Tells a network which of an image's rows it computes. `span`: of its own count of rows, those of each rank and
    its own place among them."""

    span: Callable[[int], tuple[tuple[int, ...], int]]

    def __init__(self) -> None:
        super().__init__()
        self.span = lambda mine: ((mine,), 0)


class RowAttention(nn.Module):
    """Attention of each position of this rank's rows to those of all rows. `gather`: [..., rows, W] -> [..., H, W]."""

    gather: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.gather = lambda mine: mine

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns [B, C, ..., rows, W] of queries, keys and values of that shape, with one head."""
        q, k, v = (
            x.flatten(2).transpose(1, 2)[:, None] for x in (query, self.gather(key), self.gather(value))
        )
        return F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(query.shape)
