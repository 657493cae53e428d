"""A tensor that the ranks were sent, and whether another one is the same: by identity first, then on its own device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..wire.tensor_state import SeenTensor


class SentTensor:
    """`copy`: what was sent, on the device where it was, since its owner may write into its own; `own`: nobody does."""

    def __init__(self, tensor: Tensor, own: bool = False) -> None:
        self.copy = tensor.detach() if own else tensor.detach().clone()
        self._seen = SeenTensor(tensor)

    def equals(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the same numbers. Nothing leaves a device to find out."""
        if self._seen.is_still(tensor):
            return True
        copy = self.copy
        if (copy.dtype, copy.shape, copy.device) != (tensor.dtype, tensor.shape, tensor.device):
            return False
        if not torch.equal(copy, tensor):
            return False
        self._seen = SeenTensor(tensor)
        return True
