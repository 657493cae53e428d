"""ComfyUI's attention with its queries or heads split over the ranks; every rank computes everything else in full.

This uses no description of the model, so there is none to prove.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes
from ...models.attention import Attend, AttentionCall
from ...requests import HeadTrial
from ..comm.collectives import all_gather
from ..comm.groups import Layout

# Each 16-bit number of the output costs 4 FLOPs per key to compute and 2 bytes to send. With fewer keys than this,
# sending it over PCIe takes longer than computing it (80 ps at 25 GB/s, and at 100 TFLOPS). A perfect link allows 1.
MIN_KEYS = 2048


def split_queries(layout: Layout, library: Attend, call: AttentionCall) -> Tensor:
    """Answers a call of attention with its queries split over the ranks; returns the whole output on every rank. It is
    exact for any model, because a query does not depend on other queries. Collective if queries are split; the shapes
    of q, k and mask decide that. For one layout, an attention.Replacement."""
    axis, mask, dim = layout.sequence, call.mask, call.token_dim
    queries, keys = call.q.shape[dim], call.k.shape[dim]
    sizes = split_sizes(queries, axis.size, layout.sequence_shares)
    # A mask [a, keys] is ambiguous if there are as many queries as rows: some of ComfyUI's functions take `a` as
    # queries, others as rows.
    is_ambiguous = mask is not None and mask.ndim == 2 and mask.shape[0] == queries == call.q.shape[0]
    if keys < MIN_KEYS or 0 in sizes or is_ambiguous:
        return library(call)
    local = slice_of(sizes, axis.index)
    if mask is not None and mask.ndim > 1 and mask.shape[-2] == queries:
        mask = mask[..., local, :]
    q = call.q.narrow(dim, local.start, local.stop - local.start)
    part = library(replace(call, q=q, mask=mask))
    return all_gather(part, sizes, axis, 2 if call.skip_output_reshape else 1).contiguous()


class HeadAttention:
    """An attention.Replacement that splits the heads, for a whole call of a module. It is exact for any kernel that
    computes head by head, such as another pack's attention override. `trial`: gets whether this one does; each rank
    then computes all heads as well, and answers with these."""

    def __init__(self, layout: Layout, trial: HeadTrial | None = None) -> None:
        self._axis, self._weights, self._trial = layout.sequence, layout.sequence_shares, trial
        self._is_inside = False

    def __call__(self, library: Attend, call: AttentionCall) -> Tensor:
        """Answers a call of attention, with the whole output on every rank. Collective if heads are split; the shapes
        of q, k, v and mask decide that. Heads that share keys stay on one rank."""
        key_heads = 0 if self._is_inside else self._key_heads(call)
        sizes = split_sizes(key_heads, self._axis.size, self._weights)
        if 0 in sizes:
            return library(call)
        first, count = slice_of(sizes, self._axis.index).start, sizes[self._axis.index]

        def of_rank(tensor: Tensor, dim: int) -> Tensor:
            unit = tensor.shape[dim] // key_heads
            return tensor.narrow(dim, first * unit, count * unit)

        q, k, v = (of_rank(t, 1 if call.skip_reshape else 2) for t in (call.q, call.k, call.v))
        mask = call.mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] == call.heads > 1:
            mask = of_rank(mask, 1)
        heads = call.heads // key_heads * count
        self._is_inside = True  # another pack's function may call ComfyUI's on the heads that it got
        try:
            part = library(replace(call, q=q, k=k, v=v, heads=heads, mask=mask))
        finally:
            self._is_inside = False
        dim = 1 if call.skip_output_reshape else part.ndim - 1
        lengths = tuple(size * (part.shape[dim] // count) for size in sizes)
        joined = all_gather(part, lengths, self._axis, dim).contiguous()
        return joined if self._trial is None else self._tried(self._trial, library, call, joined)

    def _tried(self, trial: HeadTrial, library: Attend, call: AttentionCall, joined: Tensor) -> Tensor:
        """Returns the output of all heads together. Notes in `trial` whether it differs from `joined`, that of heads
        which ranks have computed apart."""
        started, self._is_inside = time.perf_counter(), True
        try:
            whole = library(call)
        finally:
            self._is_inside = False
        dim = 1 if call.skip_output_reshape else whole.ndim - 1
        trial.differs |= _differ(joined, whole, dim, call.heads)
        trial.seconds += time.perf_counter() - started
        return whole

    def _key_heads(self, call: AttentionCall) -> int:
        """Returns the number of heads of keys and values, or 0 if heads cannot be split: keys and values differ in
        their number, or do not divide the queries', there are few keys, or the mask may be of heads."""
        q, k, v, mask = call.q, call.k, call.v, call.mask
        dim = 1 if call.skip_reshape else 2
        places = 1 if call.skip_reshape else q.shape[2] // call.heads  # of one head in `dim`
        same_heads = (
            q.ndim == k.ndim == v.ndim and k.shape[dim] == v.shape[dim] and k.shape[dim] % places == 0
        )
        odd_mask = mask is not None and mask.ndim == 3 and mask.shape[0] not in (1, q.shape[0])
        if not same_heads or k.shape[call.token_dim] < MIN_KEYS or odd_mask:
            return 0
        key_heads = k.shape[dim] // places
        return key_heads if key_heads and call.heads % key_heads == 0 else 0


def _differ(joined: Tensor, whole: Tensor, dim: int, heads: int) -> bool:
    """Returns True if a head of attention's output differs by more than rounding. `dim`: the one with the heads."""
    if joined.shape != whole.shape:
        return True
    error, size = (
        one.float().unflatten(dim, (heads, -1)).movedim(dim, 0).flatten(1).norm(dim=1)
        for one in (joined - whole, whole)
    )
    return not bool((error <= torch.finfo(whole.dtype).eps ** 0.5 * size).all())
