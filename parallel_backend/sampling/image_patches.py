"""The patches of a latent of any shape, defined by the elements that belong to each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import slice_of


class ElementPatches:
    """The patches of latents [B, …]. `owners` [elements]: the patch number of each element of a row; `shape`: that of a
    row; `count`: the number of patches."""

    def __init__(self, owners: Tensor, shape: torch.Size, count: int) -> None:
        self._shape = shape
        self._order = owners.argsort(stable=True)
        self._sizes = tuple(torch.bincount(owners, minlength=count).tolist())

    def __len__(self) -> int:
        return len(self._sizes)

    def span(self, patch: int) -> slice:
        """Returns the slice of a patch in the result of `pack`."""
        return slice_of(self._sizes, patch)

    def take(self, latent: Tensor, patch: int) -> Tensor:
        """Returns the elements of a patch, [B, n] from [B, …]."""
        return latent.flatten(1)[:, self._order[self.span(patch)]]

    def put(self, elements: Tensor, patch: int, latent: Tensor) -> None:
        """Writes the elements [B, n] of a patch into `latent`, which must be contiguous."""
        latent.view(len(latent), -1)[:, self._order[self.span(patch)]] = elements.to(latent.dtype)

    def pack(self, latent: Tensor) -> Tensor:
        """Returns [B, elements] from [B, …], patch after patch."""
        return latent.flatten(1)[:, self._order]

    def unpack(self, elements: Tensor) -> Tensor:
        """Reverses `pack`: returns [B, …] from [B, elements]."""
        latent = torch.empty_like(elements)
        latent[:, self._order] = elements
        return latent.unflatten(1, self._shape)
