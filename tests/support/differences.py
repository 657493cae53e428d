"""How far a result is from the one that it should be."""

from __future__ import annotations

from torch import Tensor


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest value that is expected."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
