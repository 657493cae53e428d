"""Prints (fingerprints) of parameters: a few values of each, to compare the weights that two processes hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_VALUES = 64
_SPREAD = 2654435761  # Knuth's multiplier: spreads the positions over the tensor
# Prefix of a refusal; the comma-separated names of weights that the sender has changed follow it.
OTHER_WEIGHTS = "not the file's weights: "
Print = tuple[str, tuple[int, ...], bytes]


def print_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Print | None:
    """Returns (dtype, shape, the bytes of at most 64 values), with the values cast to `dtype` if given. Returns None if
    values cannot be read by position: a quantised, empty or non-contiguous tensor, or one on the meta device."""
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    if tensor.is_meta or not is_plain or not tensor.numel() or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    places = torch.arange(min(_VALUES, flat.numel()))
    if flat.numel() > _VALUES:
        places = places * _SPREAD % flat.numel()
    values = flat[places.to(flat.device)].to(dtype=dtype or tensor.dtype).cpu().contiguous()
    return str(values.dtype), tuple(tensor.shape), values.view(torch.uint8).numpy().tobytes()


def prints_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Print]:
    """Returns the prints by name, without tensors that have none."""
    found = ((name, print_of(tensor)) for name, tensor in tensors)
    return {name: one for name, one in found if one is not None}


def differing(tensors: Mapping[str, Tensor], prints: Mapping[str, Print]) -> list[str]:
    """Returns the names of tensors whose values, cast to the dtype of the print, differ from `prints`."""
    found = []
    for name, (dtype, shape, values) in prints.items():
        cast = getattr(torch, dtype.removeprefix("torch."))
        local = print_of(tensors[name], cast) if name in tensors else None
        if local is not None and local[1:] != (shape, values):
            found.append(name)
    return found
