"""The prompts that the ranks already hold, so that a stepwise run sends each of them once and not with every step."""

from __future__ import annotations

import torch

from ..requests import Conditioning

# A prompt and its negative, alone and as one batch, for two samplers in turn.
CAPACITY = 8


class KnownPrompts:
    """Conditionings by the key under which the ranks keep them, the least recently used first."""

    def __init__(self) -> None:
        self._known: dict[int, Conditioning] = {}
        self._forget: list[int] = []
        self._next = 1

    def find(self, conditioning: Conditioning) -> tuple[int, bool]:
        """(key, whether the ranks must still be sent the tensors)."""
        for key in reversed(self._known):
            if _same(self._known[key], conditioning):
                self._known[key] = self._known.pop(key)
                return key, False
        if len(self._known) >= CAPACITY:
            self.drop(next(iter(self._known)))
        key, self._next = self._next, self._next + 1
        self._known[key] = _copied(conditioning)
        return key, True

    def drop(self, key: int) -> None:
        """The key is not used again; the ranks are told with the next request."""
        if self._known.pop(key, None) is not None:
            self._forget.append(key)

    def take_forgotten(self) -> tuple[int, ...]:
        forgotten, self._forget = tuple(self._forget), []
        return forgotten


def _same(a: Conditioning, b: Conditioning) -> bool:
    return all(
        _equal(x, y) for x, y in ((a.pooled, b.pooled), (a.guidance, b.guidance), (a.context, b.context))
    )  # the largest last


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.to(a.device))


def _copied(conditioning: Conditioning) -> Conditioning:
    # A copy: the caller may write into its tensors later.
    return Conditioning(
        context=conditioning.context.detach().cpu().clone(),
        pooled=conditioning.pooled.detach().cpu().clone(),
        guidance=None if conditioning.guidance is None else conditioning.guidance.detach().cpu().clone(),
    )
