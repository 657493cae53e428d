"""LTX's guides, each of a strength: what is added to the scores of attention, in parts by where the queries lie.

As ComfyUI computes it (comfy.ldm.lightricks.model.GuideAttentionMask): one row for all queries of the video, one for
each token of a guide, nothing for queries after them; never a row for each of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kernels import additive, attend_with_lse


@dataclass(frozen=True)
class _Part:
    """What is added to the scores of the queries [begin, end), end None for all that follow: [1, 1, 1 or n, S]."""

    begin: int
    end: int | None
    mask: Tensor | None


@dataclass(frozen=True)
class Guides:
    """Of all queries of a sequence, over all its keys, both in its order."""

    parts: tuple[_Part, ...]

    @classmethod
    def of(cls, value: Any) -> Guides | None:
        """From what a block was given; None where that is a mask as any, or none."""
        if value is None or isinstance(value, Tensor):
            return None
        first, end = value.guide_start, value.guide_start + value.tracked_count
        return cls(
            (_Part(0, first, value.noisy_mask), _Part(first, end, value.tracked_mask), _Part(end, None, None))
        )

    def of_queries(self, first: int, count: int) -> list[tuple[slice, Tensor | None]]:
        """Of `count` queries from number `first` on: which of these, counted from there, have which mask."""
        found = []
        for part in self.parts:
            begin = max(part.begin, first)
            end = first + count if part.end is None else min(part.end, first + count)
            if begin < end:
                mask = part.mask
                if mask is not None and mask.shape[2] > 1:
                    mask = mask[:, :, begin - part.begin : end - part.begin]
                found.append((slice(begin - first, end - first), mask))
        return found

    def attend_with_lse(
        self, q: Tensor, first: int, key: Tensor, value: Tensor, keys: slice, kernel: str
    ) -> tuple[Tensor, Tensor]:
        """Returns (out, lse) of queries, from number `first` on, over keys of these numbers."""
        found = []
        for local, mask in self.of_queries(first, q.shape[2]):
            queries = q[:, :, local]
            if mask is not None:
                mask = additive(mask[..., keys], q.dtype).expand(-1, -1, queries.shape[2], -1)
            found.append(attend_with_lse(queries, key, value, mask, kernel))
        if not found:  # a group without tokens
            return attend_with_lse(q, key, value, None, kernel)
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 2), torch.cat(lses, 2)
