"""ComfyUI's attention with its queries shared out over ranks, each of which computes everything else for itself.

Exact for any model: queries do not look at each other. Nothing of the model is known, so nothing of it is proven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic

# Each 16-bit number of an answer takes 4 FLOPs a key to compute and 2 bytes on the wire: with fewer keys than this,
# gathering it over PCIe takes longer (at 100 TFLOPS and 25 GB/s; both in 80 ps). It would be 1 on a perfect link.
MIN_KEYS = 2048


class QueryAttention:
    """base.AttentionCall of a whole call of a module, whose tokens are whole on every rank."""

    def __init__(self, layout: Layout, traffic: Traffic) -> None:
        self._axis = layout.sequence
        self._weights = layout.sequence_shares
        self._traffic = traffic

    def __call__(
        self,
        original: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **others: Any,
    ) -> Tensor:
        """As ComfyUI's attention functions, with the whole answer on every rank. Collective where it is shared out,
        which the sizes alone decide."""
        others |= {
            "attn_precision": attn_precision,
            "skip_reshape": skip_reshape,
            "skip_output_reshape": skip_output_reshape,
        }
        dim = 2 if skip_reshape else 1
        queries, keys = q.shape[dim], k.shape[dim]
        sizes = split_sizes(queries, self._axis.size, self._weights)
        if keys < MIN_KEYS or 0 in sizes or _may_be_of_rows(mask, q, queries):
            return original(q, k, v, heads, mask=mask, **others)
        local = slice_of(sizes, self._axis.index)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == queries:
            mask = mask[..., local, :]
        part = original(
            q.narrow(dim, local.start, local.stop - local.start), k, v, heads, mask=mask, **others
        )
        out_dim = 2 if skip_output_reshape else 1
        whole = all_gather(part.movedim(out_dim, 0).contiguous(), sizes, self._axis, self._traffic)
        return whole.movedim(0, out_dim).contiguous()


def _may_be_of_rows(mask: Tensor | None, q: Tensor, queries: int) -> bool:
    """Some of ComfyUI's functions take a mask [a, keys] for one of each query, others for one of each row; with as many
    queries as rows nobody can tell which."""
    return mask is not None and mask.ndim == 2 and mask.shape[0] == queries == q.shape[0]
