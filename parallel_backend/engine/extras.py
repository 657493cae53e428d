"""A rank's share of what a model call carries beside its latent: residuals of a ControlNet, masks of attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Scores this low have no weight in any softmax, and unlike infinity they leave no NaN where a rank's part of the keys
# is masked out as a whole.
_MASKED = -1e30


class ResidualShares:
    """Residuals of a ControlNet for a rank's own of `count` image tokens (base.Residuals): [r, len(own), width] after a
    block, 0 for tokens beyond the residual's. Blocks that share a residual share what is moved of it."""

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
