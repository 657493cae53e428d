"""The patches of a latent of any form, by which of its elements belong to each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import slice_of


class ElementPatches:
    """`owners` [elements]: of each element of a row of latents [B, …] the number of its patch, of `count`. `shape`: of
    a row."""

    def __init__(self, owners: Tensor, shape: torch.Size, count: int) -> None:
        self._shape = shape
        self._order = owners.argsort(stable=True)
        self._sizes = tuple(torch.bincount(owners, minlength=count).tolist())

    def __len__(self) -> int:
        return len(self._sizes)

    def span(self, patch: int) -> slice:
        """Of a patch in what `pack` gives."""
        return slice_of(self._sizes, patch)

    def take(self, latent: Tensor, patch: int) -> Tensor:
        """[B, …] -> [B, n]: the elements of a patch."""
        return latent.flatten(1)[:, self._order[self.span(patch)]]

    def put(self, elements: Tensor, patch: int, latent: Tensor) -> None:
        """Writes the elements of a patch into a latent, which lies in one piece."""
        latent.view(len(latent), -1)[:, self._order[self.span(patch)]] = elements.to(latent.dtype)

    def pack(self, latent: Tensor) -> Tensor:
        """[B, …] -> [B, elements], patch after patch."""
        return latent.flatten(1)[:, self._order]

    def unpack(self, elements: Tensor) -> Tensor:
        """[B, elements] -> [B, …]"""
        latent = torch.empty_like(elements)
        latent[:, self._order] = elements
        return latent.unflatten(1, self._shape)
