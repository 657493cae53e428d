"""Attention masks for LTX's guides, each with its own strength: one mask per range of queries.

ComfyUI computes the same (comfy.ldm.lightricks.model.GuideAttentionMask). All queries of the video share one row, each
token of a guide has its own row, and queries after the guides have no mask. There is never one row per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels import additive, attend_with_lse


@dataclass(frozen=True)
class Guides:
    """The masks for all queries of a sequence over all its keys, both in the order of the sequence. `parts`: (first
    query, end, None for all later queries; a mask [1, 1, 1 or n, S] that is added to their scores, or None)."""

    parts: tuple[tuple[int, int | None, Tensor | None], ...]

    @classmethod
    def of(cls, value: Any) -> Guides | None:
        """Returns the guides in an object of ComfyUI's, or None if there is none."""
        if value is None:
            return None
        first, end = value.guide_start, value.guide_start + value.tracked_count
        return cls(((0, first, value.noisy_mask), (first, end, value.tracked_mask), (end, None, None)))

    def of_queries(self, first: int, count: int) -> list[tuple[slice, Tensor | None]]:
        """Splits `count` queries, from number `first` on, into (slice relative to `first`, its mask or None)."""
        found = []
        for part_begin, part_end, mask in self.parts:
            begin = max(part_begin, first)
            end = first + count if part_end is None else min(part_end, first + count)
            if begin < end:
                if mask is not None and mask.shape[2] > 1:
                    mask = mask[:, :, begin - part_begin : end - part_begin]
                found.append((slice(begin - first, end - first), mask))
        return found

    def attend_with_lse(
        self, q: Tensor, first: int, key: Tensor, value: Tensor, keys: slice, kernel: str
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, lse). `first`: number of the first query of `q`; `keys`: the numbers of the given keys."""
        found = []
        for local, mask in self.of_queries(first, q.shape[2]):
            queries = q[:, :, local]
            if mask is not None:
                mask = additive(mask[..., keys], q.dtype).expand(-1, -1, queries.shape[2], -1)
            found.append(attend_with_lse(queries, key, value, mask, kernel))
        if not found:  # a Ulysses group without tokens
            return attend_with_lse(q, key, value, None, kernel)
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)
