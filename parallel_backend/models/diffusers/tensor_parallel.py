"""Tensor parallelism of Flux: which rows or columns of each linear layer a rank holds, and the layers that need others.

The plan is diffusers' own as data (`FluxTransformer2DModel._tp_plan`; Megatron-LM, Shoeybi et al. 2019, §3): the layers
into attention and feed-forward are split by rows of their weights, so that a rank has whole heads, the layers out of
them by columns, so that the ranks' results add up. Beyond that plan the modulation is split by rows and its small
output put together: it is a quarter of Flux's weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.hooks.tensor_parallel import TPShardSpec, resolve_tp_shard_specs
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxTransformer2DModel
from torch import Tensor, nn

from ..base import Slices
from .keys import JOINED_BY_TENSOR_PARALLELISM

_MODULATION = (
    "transformer_blocks.*.norm1.linear",
    "transformer_blocks.*.norm1_context.linear",
    "single_transformer_blocks.*.norm.linear",
)


class PartialLinear(nn.Linear):
    """A linear layer of which this rank holds some columns: takes its share of the input, gives the whole output."""

    def __init__(self, columns: int, rows: int, bias: bool, add_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__(columns, rows, bias)
        self.add_up = add_up

    def forward(self, input: Tensor) -> Tensor:
        output = self.add_up(F.linear(input, self.weight.to(input.dtype)))
        return output if self.bias is None else output + self.bias.to(input.dtype)


class JoinedLinear(nn.Linear):
    """A linear layer of which this rank holds some rows: takes the whole input [B, in], gives the whole output."""

    def __init__(self, columns: int, rows: int, bias: bool, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__(columns, rows, bias)
        self.join = join

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return self.join(F.linear(input, self.weight.to(input.dtype), bias))


def slice_layers(transformer: FluxTransformer2DModel, slices: Slices) -> dict[str, TPShardSpec]:
    """Turns the linear layers of a transformer on the meta device into this rank's slices of them.

    Returns for each parameter of theirs which dim is split, in which blocks. Heads must divide by the degree.
    """
    plan = {**transformer._tp_plan, **dict.fromkeys(_MODULATION, "colwise")}
    specs = resolve_tp_shard_specs(transformer, plan, slices.degree)
    for name, spec in specs.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight":
            transformer.set_submodule(
                path, _sliced_layer(path, transformer.get_submodule(path), spec, slices)
            )
    for module in transformer.modules():
        if isinstance(module, FluxAttention):
            module.heads //= slices.degree
            module.inner_dim //= slices.degree
    return specs


def _sliced_layer(path: str, whole: nn.Linear, spec: TPShardSpec, slices: Slices) -> nn.Linear:
    rows, columns, bias = whole.out_features, whole.in_features, whole.bias is not None
    with torch.device("meta"):
        if spec.dim == 1:
            return PartialLinear(columns // slices.degree, rows, bias, slices.add_up)
        if path.endswith(JOINED_BY_TENSOR_PARALLELISM):
            return JoinedLinear(columns, rows // slices.degree, bias, slices.join)
        return nn.Linear(columns, rows // slices.degree, bias)


def take_slice(tensor: Tensor, spec: TPShardSpec, slices: Slices, rows: slice = slice(None)) -> Tensor:
    """Rows `rows` of this rank's slice of a whole parameter: a view unless the slice lies in two places."""
    if spec.dim is None:
        return tensor[rows]
    parts, first = [], 0
    for size in spec.block_sizes:
        width = size // slices.degree
        parts.append(tensor.narrow(spec.dim, first + slices.index * width, width))
        first += size
    if len(parts) == 1:
        return parts[0][rows]
    if spec.dim == 0:
        return torch.cat(parts)[rows]
    return torch.cat([part[rows] for part in parts], dim=spec.dim)
