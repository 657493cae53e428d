"""Linear layers that keep their weights as stored (mapped file pages, fp8) and compute in the dtype of their input.

diffusers' own layerwise casting writes the cast weights back into the module, which would give every rank a private
copy of the mapped file; these cast into a temporary that is gone after the layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CastingLinear(nn.Linear):
    """nn.Linear whose weight and bias are cast to the input's dtype on use."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class HalvesSwapped(nn.Module):
    """A linear layer whose two output halves change places: (shift, scale) as stored becomes (scale, shift)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:
        first, second = self.inner(input).chunk(2, dim=-1)
        return torch.cat([second, first], dim=-1)


def cast_on_use(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Turns every linear layer below `module` whose storage differs from `compute_dtype` into a casting one."""
    for layer in module.modules():
        if type(layer) is nn.Linear and any(p.dtype != compute_dtype for p in layer.parameters()):
            layer.__class__ = CastingLinear
