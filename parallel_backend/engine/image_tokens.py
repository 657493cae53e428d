"""All image tokens of one model call, those of reference latents after the image's own, and the shares of extras."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.flux.packing import image_ids, pack
from .rows import Rows

# Scores this low have no weight in any softmax, and unlike infinity they leave no NaN where a rank's part of the keys
# is masked out as a whole.
_MASKED = -1e30


@dataclass(frozen=True)
class ImageTokens:
    """tokens [r, N, channels], ids [N, 3]; `own`: how many of them, the first ones, the image itself has."""

    tokens: Tensor
    ids: Tensor
    own: int

    @property
    def count(self) -> int:
        return self.tokens.shape[1]


def image_tokens(rows: Rows) -> ImageTokens:
    """Of rows with the same references."""
    device = rows.x.device
    places = (None,) if rows.extras.places is None else rows.extras.places
    tokens, ids = [], []
    for latent, place in zip((rows.x, *rows.extras.references), places, strict=True):
        latent = latent.expand(len(rows.x), *latent.shape[1:]).to(device, rows.x.dtype)
        tokens.append(pack(latent))
        ids.append(image_ids(*latent.shape[-2:], device, place))
    return ImageTokens(torch.cat(tokens, dim=1), torch.cat(ids), tokens[0].shape[1])


class ResidualShares:
    """What a ControlNet adds after a block to a rank's own of `count` image tokens: [r, len(own), hidden], 0 for tokens
    beyond the residual's; None for nothing. Blocks that share a residual share what is moved of it."""

    def __init__(
        self,
        residuals: dict[int, Tensor],
        own: Tensor | slice,
        count: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._residuals = residuals
        self._own = own
        self._count = count
        self._to = (device, dtype)
        self._moved: dict[int, Tensor] = {}  # by the identity of the whole

    def __call__(self, block: int) -> Tensor | None:
        residual = self._residuals.get(block)
        if residual is None:
            return None
        if id(residual) not in self._moved:
            self._moved[id(residual)] = self._share(residual)
        return self._moved[id(residual)]

    def _share(self, residual: Tensor) -> Tensor:
        if residual.shape[1] < self._count:
            residual = F.pad(residual, (0, 0, 0, self._count - residual.shape[1]))
        return residual[:, self._own].to(*self._to)


def mask_in_order(mask: Tensor, order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask [r, S, S] over text and image as what is added to scores [r, 1, S, S], its tokens in `order`."""
    where = torch.tensor(order, dtype=torch.long)
    mask = mask.index_select(1, where).index_select(2, where)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, _MASKED)
    least = max(_MASKED, torch.finfo(dtype).min)
    return mask.float().clamp(min=least).to(device, dtype).unsqueeze(1)
