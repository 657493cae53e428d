"""ComfyUI's attention with its heads split over the ranks, each of which has all tokens. This is exact for any kernel
that computes head by head, such as another pack's attention override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...layout import slice_of, split_sizes
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic


class HeadAttention:
    """A base.AttentionCall for a whole call of a module. `least`: with fewer keys, heads are not split."""

    def __init__(self, layout: Layout, traffic: Traffic, least: int) -> None:
        self._axis, self._weights, self._traffic, self._least = (
            layout.sequence,
            layout.sequence_shares,
            traffic,
            least,
        )
        self._is_inside = False

    def __call__(
        self,
        original: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> Tensor:
        others |= {
            "attn_precision": attn_precision,
            "skip_reshape": skip_reshape,
            "skip_output_reshape": skip_output_reshape,
        }
        sizes = split_sizes(heads, self._axis.size, self._weights)
        same = q.shape[1] == k.shape[1] if skip_reshape else q.shape[-1] == k.shape[-1] == v.shape[-1]
        keys = k.shape[2 if skip_reshape else 1]
        odd_mask = mask is not None and mask.ndim == 3 and mask.shape[0] not in (1, q.shape[0])
        if self._is_inside or not same or keys < self._least or 0 in sizes or odd_mask:
            return original(q, k, v, heads, mask=mask, **others)
        local = slice_of(sizes, self._axis.index)
        count = local.stop - local.start
        if skip_reshape:
            q, k, v = (t[:, local] for t in (q, k, v))
        else:
            width = q.shape[-1] // heads
            q, k, v = (t[..., local.start * width : local.stop * width] for t in (q, k, v))
        if mask is not None and mask.ndim == 4 and mask.shape[1] == heads > 1:
            mask = mask[:, local]
        self._is_inside = True  # another pack's function may call ComfyUI's on the heads that it got
        try:
            part = original(q, k, v, count, mask=mask, **others)
        finally:
            self._is_inside = False
        dim, unit = (1, 1) if skip_output_reshape else (part.ndim - 1, part.shape[-1] // count)
        moved = part.movedim(dim, 0).contiguous()
        whole = all_gather(moved, tuple(size * unit for size in sizes), self._axis, self._traffic)
        return whole.movedim(0, dim).contiguous()
