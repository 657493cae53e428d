"""ComfyUI's attention with its queries split over the ranks; every rank computes everything else in full.

This is exact for any model, because a query does not depend on other queries. It uses no description of the model, so
there is none to prove.
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

# Each 16-bit number of the output costs 4 FLOPs per key to compute and 2 bytes to send. With fewer keys than this,
# sending it over PCIe takes longer than computing it (80 ps at 25 GB/s, and at 100 TFLOPS). A perfect link allows 1.
MIN_KEYS = 2048


class QueryAttention:
    """A base.AttentionCall for a whole call of a module; every rank has all tokens."""

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
        """Answers a call of ComfyUI's attention, with the whole output on every rank. Collective if queries are split;
        the shapes of q, k and mask decide that."""
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
    """Returns True if a mask [a, keys] is ambiguous, because there are as many queries as rows: some of ComfyUI's
    functions take `a` as queries, others as rows."""
    return mask is not None and mask.ndim == 2 and mask.shape[0] == queries == q.shape[0]
