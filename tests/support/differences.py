"""How far a result is from the one that it should be."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value that is expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def numbers_held(parameter: torch.Tensor) -> int:
    """Numbers of a parameter that are in memory; 0 for what stands for an absent one, whose shape shares one number."""
    return 0 if parameter.untyped_storage().nbytes() <= parameter.element_size() else parameter.numel()
