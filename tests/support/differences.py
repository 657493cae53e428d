"""Differences between results and expected values, and the size of a parameter in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the largest absolute difference, relative to the largest expected absolute value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def numbers_held(parameter: torch.Tensor) -> int:
    """Returns how many numbers of a parameter are in memory: 0 for a placeholder (one number expanded to a shape)."""
    return 0 if parameter.untyped_storage().nbytes() <= parameter.element_size() else parameter.numel()
