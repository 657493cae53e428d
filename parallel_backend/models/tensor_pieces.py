"""Splits a tensor of any format into plain ones (itself, or codes and scales) and joins them; casts to a dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def component_tensors(tensor: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tensor]]:
    """Returns (its plain tensors, a function that builds such a tensor from others of these shapes). The function holds
    no memory of `tensor`. Works for every subclass with torch's protocol for wrappers (`__tensor_flatten__`).
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.detach()], lambda pieces: pieces[0]
    names, context = tensor.__tensor_flatten__()
    kind: Any = type(tensor)
    shape, stride = tensor.shape, tensor.stride()

    def assemble_tensor(pieces: Sequence[Tensor]) -> Tensor:
        return kind.__tensor_unflatten__(dict(zip(names, pieces, strict=True)), context, shape, stride)

    return [getattr(tensor, name).detach() for name in names], assemble_tensor


def as_built(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns the tensor in `dtype`; unchanged if that is None or the tensor is quantised."""
    return tensor if dtype is None or hasattr(tensor, "__tensor_flatten__") else tensor.to(dtype)
