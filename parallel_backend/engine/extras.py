"""A rank's share of what a model call carries beside its latent: residuals of a ControlNet, masks of attention."""

from __future__ import annotations

import functools
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
        # By the identity of the whole; with when it has arrived, where that is beside what is computed.
        self._moved: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._residuals

    def begin(self, block: int) -> None:
        residual = self._residuals.get(block)
        if residual is None or id(residual) in self._moved:
            return
        device = self._to[0]
        if device.type != "cuda" or residual.device.type != "cpu":
            self._moved[id(residual)] = self._share(residual), None
            return
        # In the stream of what is computed, a copy from memory that is not pinned would wait for all of that.
        stream = _copies_to(device)
        with torch.cuda.stream(stream):
            self._moved[id(residual)] = self._share(residual), stream.record_event()

    def __call__(self, block: int) -> Tensor:
        self.begin(block)
        moved, arrived = self._moved[id(self._residuals[block])]
        if arrived is not None:
            computing = torch.cuda.current_stream(self._to[0])
            computing.wait_event(arrived)
            moved.record_stream(computing)
        return moved

    def _share(self, residual: Tensor) -> Tensor:
        if residual.shape[1] < self._count:
            residual = F.pad(residual, (0, 0, 0, self._count - residual.shape[1]))
        return residual[:, self._own].to(*self._to, non_blocking=True)


@functools.cache
def _copies_to(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class OrderedMasks:
    """Masks with their tokens in the order of the ranks', each put in order once: those that a rank was sent are kept,
    and nobody writes into them. The two used last stay, a prompt's and its negative's."""

    def __init__(self) -> None:
        # With each the mask that it was made of, so that no other one comes to lie where that does.
        self._ordered: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def get(self, mask: Tensor, order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """As mask_in_order."""
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, tuple(order), dtype)
        found = self._ordered.pop(key, None)
        if found is None:
            while len(self._ordered) > 1:
                del self._ordered[next(iter(self._ordered))]
            found = (mask, mask_in_order(mask, order, dtype, device))
        self._ordered[key] = found
        return found[1]


def mask_in_order(mask: Tensor, order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A mask [r, S, S] over text and image as what is added to scores [r, 1, S, S], its tokens in `order`."""
    where = torch.tensor(order, dtype=torch.long, device=mask.device)
    mask = mask.index_select(1, where).index_select(2, where)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, _MASKED)
    least = max(_MASKED, torch.finfo(dtype).min)
    return mask.float().clamp(min=least).to(device, dtype).unsqueeze(1)
