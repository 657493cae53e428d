"""Attention keys and values of the previous step, to which PipeFusion's patches attend."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..tokens.block_tokens import BlockTokens


class StaleKeyCache:
    """The newest keys and values of all tokens of one job's rows, for each attention call in this stage's blocks, with
    this rank's heads only.

    `counts`: the number of tokens in the image's stream, by the prompts of the rows."""

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self.masked = False  # True if attention had a mask: how to cut it to a patch is unknown
        # All keys and values, in the order of their tokens.
        self.held: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @property
    def among(self) -> int:
        """The largest of `counts` if the prompts differ in it, because the image's stream also has their text;
        otherwise 0."""
        counts = set(self.counts.values())
        return max(counts) if len(counts) > 1 else 0


class BlockKeys:
    """The keys for one call of a block (sequence.StaleKeys); its attention calls come in the same order each time.
    `keys`: None if no patches follow, so that attention uses only the keys of its call; `place`: (prompts of the rows,
    block); `tokens`: those of a patch, whose keys and values replace older ones, or of whole images, which are all
    stored."""

    def __init__(self, keys: StaleKeyCache | None, place: Hashable, tokens: BlockTokens) -> None:
        self._keys, self._place, self._tokens = keys, place, tokens
        self._calls = 0

    def meet_mask(self) -> None:
        """Notes that attention has a mask."""
        if self._keys is not None:
            self._keys.masked = True

    def newest(self, k: Tensor, v: Tensor, stream: str) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, h, s, D], with tokens in the order of an exchange. Returns those to attend to: the
        given ones for whole images, the stored ones of all tokens for a patch."""
        if self._keys is None:
            return k, v
        place, whole = (self._place, self._calls), self._tokens.patch is None
        self._calls += 1
        if whole:
            self._keys.held[place] = torch.empty_like(k), torch.empty_like(v)
        numbers, held = self._tokens.order(stream, k.device), self._keys.held[place]
        for kept, new in zip(held, (k, v), strict=True):
            kept.index_copy_(2, numbers, new)
        return (k, v) if whole else held
