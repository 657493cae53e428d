"""Linear layers that keep their weights as stored (mapped file pages, fp8) and compute in the dtype of their input,
or in fp8 on request.

diffusers' own layerwise casting writes the cast weights back into the module, which would give every rank a private
copy of the mapped file. These layers cast into a temporary tensor that is freed after the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FP8_SIDE = 16  # torch._scaled_mm needs both sides of the weight to be multiples of this


class CastingLinear(nn.Linear):
    """nn.Linear whose weight and bias are cast to the input's dtype on use."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Fp8Linear(CastingLinear):
    """A layer that multiplies float8_e4m3fn weights without a cast: one byte of memory traffic per weight instead of
    five. The input is rounded to fp8 as well, with the scale 1, as in ComfyUI's fp8_e4m3fn_fast."""

    def forward(self, input: Tensor) -> Tensor:
        if not input.numel():  # a rank may have no tokens
            return super().forward(input)
        limit = torch.finfo(torch.float8_e4m3fn).max  # larger values would become NaN
        rows = input.reshape(-1, self.in_features).clamp(-limit, limit).to(torch.float8_e4m3fn)
        scale = torch.ones((), device=input.device)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        out = torch._scaled_mm(rows, self.weight.t(), scale, scale, bias=bias, out_dtype=input.dtype)
        return out.view(*input.shape[:-1], self.out_features)


class HalvesSwapped(nn.Module):
    """A linear layer with its two output halves swapped: (shift, scale) as stored becomes (scale, shift)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:
        first, second = self.inner(input).chunk(2, dim=-1)
        return torch.cat([second, first], dim=-1)


def cast_on_use(
    module: nn.Module,
    compute_dtype: torch.dtype,
    kept: Callable[[Tensor], torch.dtype] = attrgetter("dtype"),
    *,
    in_fp8: bool = False,
) -> None:
    """Turns each linear layer in `module` with parameters in another dtype than `compute_dtype` into a casting layer.
    `kept`: gives the dtype that a parameter will be stored in; `in_fp8`: layers stored in fp8 become Fp8Linear if their
    sides allow it."""
    for layer in module.modules():
        if type(layer) is nn.Linear and any(kept(p) != compute_dtype for p in layer.parameters()):
            fits = layer.in_features % _FP8_SIDE == layer.out_features % _FP8_SIDE == 0
            fp8 = in_fp8 and fits and kept(layer.weight) == torch.float8_e4m3fn
            layer.__class__ = Fp8Linear if fp8 else CastingLinear
