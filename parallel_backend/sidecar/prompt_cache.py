"""The inputs that the ranks already hold, so that a stepwise run sends each once and not with every step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from .sent_tensor import SentTensor

# A prompt and its negative, alone and as one batch, for two samplers in turn.
PROMPTS = 8
# Of a mask and its negative's: each has as many numbers as there are pairs of tokens.
MASKS = 2


class KnownInputs:
    """Inputs of a few tensors each by the key under which the ranks keep them, the least recently used first. `keys`:
    where new ones come from."""

    def __init__(self, capacity: int, keys: Iterator[int]) -> None:
        self._capacity = capacity
        self._keys = keys
        self._known: dict[int, tuple[SentTensor | None, ...]] = {}
        self._forget: list[int] = []

    def find(self, tensors: Sequence[Tensor | None]) -> tuple[int, bool]:
        """(key, whether the ranks must still be sent the tensors)."""
        for key in reversed(self._known):
            known = self._known[key]
            if len(known) == len(tensors) and all(map(_same, known, tensors)):
                self._known[key] = self._known.pop(key)
                return key, False
        if len(self._known) >= self._capacity:
            self.drop(next(iter(self._known)))
        key = next(self._keys)
        self._known[key] = tuple(None if tensor is None else SentTensor(tensor) for tensor in tensors)
        return key, True

    def drop(self, key: int) -> None:
        """The key is not used again; the ranks are told with the next request."""
        if self._known.pop(key, None) is not None:
            self._forget.append(key)

    def take_forgotten(self) -> tuple[int, ...]:
        forgotten, self._forget = tuple(self._forget), []
        return forgotten


class KnownOfModel:
    """What the ranks keep of one model's calls: prompts, and masks of attention."""

    def __init__(self) -> None:
        keys = itertools.count(1)
        self.prompts = KnownInputs(PROMPTS, keys)
        self.masks = KnownInputs(MASKS, keys)

    def take_forgotten(self) -> tuple[int, ...]:
        """Keys of either."""
        return self.prompts.take_forgotten() + self.masks.take_forgotten()


def _same(known: SentTensor | None, tensor: Tensor | None) -> bool:
    if known is None or tensor is None:
        return known is None and tensor is None
    return known.equals(tensor)
