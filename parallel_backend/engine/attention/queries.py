"""ComfyUI's attention with its queries split over the ranks; every rank computes everything else in full.

This is exact for any model, because a query does not depend on other queries. It uses no description of the model, so
there is none to prove.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...layout import slice_of, split_sizes
from ...models.attention import Attend, AttentionCall
from ..comm.collectives import all_gather
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic

# Each 16-bit number of the output costs 4 FLOPs per key to compute and 2 bytes to send. With fewer keys than this,
# sending it over PCIe takes longer than computing it (80 ps at 25 GB/s, and at 100 TFLOPS). A perfect link allows 1.
MIN_KEYS = 2048


class QueryAttention:
    """An attention.Replacement for a whole call of a module; every rank has all tokens."""

    def __init__(self, layout: Layout, traffic: Traffic) -> None:
        self._axis = layout.sequence
        self._weights = layout.sequence_shares
        self._traffic = traffic

    def __call__(self, library: Attend, call: AttentionCall) -> Tensor:
        """Answers a call of attention, with the whole output on every rank. Collective if queries are split; the shapes
        of q, k and mask decide that."""
        mask, dim = call.mask, call.token_dim
        queries, keys = call.q.shape[dim], call.k.shape[dim]
        sizes = split_sizes(queries, self._axis.size, self._weights)
        # A mask [a, keys] is ambiguous if there are as many queries as rows: some of ComfyUI's functions take `a` as
        # queries, others as rows.
        is_ambiguous = mask is not None and mask.ndim == 2 and mask.shape[0] == queries == call.q.shape[0]
        if keys < MIN_KEYS or 0 in sizes or is_ambiguous:
            return library(call)
        local = slice_of(sizes, self._axis.index)
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == queries:
            mask = mask[..., local, :]
        q = call.q.narrow(dim, local.start, local.stop - local.start)
        part = library(replace(call, q=q, mask=mask))
        dim = 2 if call.skip_output_reshape else 1
        return all_gather(part, sizes, self._axis, self._traffic, dim).contiguous()
