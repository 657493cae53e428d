"""Keys and values of the step before in a module's attention, which PipeFusion's patches attend to."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..tokens.block_tokens import BlockTokens


class StaleKeyCache:
    """The newest keys and values of all tokens of one job's rows, of each call of attention in this stage's blocks, for
    this rank's heads.

    `counts`: by whose rows, the tokens of the stream that has the image's."""

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self.masked = False  # whether attention had a mask, whose form for a patch nobody knows
        self._held: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @property
    def among(self) -> int:
        """Tokens of the longest stream that has the image's, where those of the prompts differ, having text too; else
        0."""
        counts = set(self.counts.values())
        return max(counts) if len(counts) > 1 else 0

    def of_block(self, place: Hashable, tokens: BlockTokens) -> BlockKeys:
        """Returns what attention asks in one call of a block. `place`: whose rows in which block; `tokens`: of a patch,
        whose keys and values replace the older ones, or of whole images, whose keys and values are all kept."""
        return BlockKeys(self, place, tokens)

    def put(self, place: Hashable, k: Tensor, v: Tensor, numbers: Tensor, *, whole: bool) -> None:
        """Takes the keys and values [B, h, s, D] of the tokens with these numbers. `whole`: they are all."""
        if whole:
            self._held[place] = torch.empty_like(k), torch.empty_like(v)
        for held, new in zip(self._held[place], (k, v), strict=True):
            held.index_copy_(2, numbers, new)

    def get(self, place: Hashable) -> tuple[Tensor, Tensor]:
        """All keys and values, in the order of their tokens."""
        return self._held[place]


class NoKeys:
    """Takes the place of BlockKeys where no patches follow: attention has the keys of its call alone."""

    def meet_mask(self) -> None: ...

    def newest(self, k: Tensor, v: Tensor, stream: str) -> tuple[Tensor, Tensor]:
        return k, v


NO_KEYS = NoKeys()


class BlockKeys:
    """Answers attention in one call of a block (sequence.StaleKeys); its calls come in the same order each time."""

    def __init__(self, keys: StaleKeyCache, place: Hashable, tokens: BlockTokens) -> None:
        self._keys, self._place, self._tokens = keys, place, tokens
        self._calls = 0

    def meet_mask(self) -> None:
        """Notes that attention has a mask here."""
        self._keys.masked = True

    def newest(self, k: Tensor, v: Tensor, stream: str) -> tuple[Tensor, Tensor]:
        """Takes keys and values [B, h, s, D] as an exchange brings them, and returns those to attend to: the same for
        whole images, those of all tokens for a patch."""
        place, whole = (self._place, self._calls), self._tokens.patch is None
        self._calls += 1
        self._keys.put(place, k, v, self._tokens.order(stream, k.device), whole=whole)
        return (k, v) if whole else self._keys.get(place)
