"""Tensors of any format: the plain ones of which one is made (itself, or codes and scales), and back; other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def component_tensors(tensor: Tensor) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tensor]]:
    """(its plain tensors, what makes a tensor like it of others of these shapes); the latter keeps none of its memory.

    Works for every subclass that wraps tensors by torch's protocol for them (`__tensor_flatten__`).
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
    """A parameter of a file in the dtype that its module was built with; None and quantised ones keep their own."""
    return tensor if dtype is None or hasattr(tensor, "__tensor_flatten__") else tensor.to(dtype)
