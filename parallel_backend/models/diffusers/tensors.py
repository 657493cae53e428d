"""One tensor of Flux's original layout out of a file of either layout, and the diffusers parameters made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .checkpoint import FluxFile
from .keys import FluxDims, Source, diffusers_sources

_sources = lru_cache(maxsize=8)(diffusers_sources)


def original_tensor(file: FluxFile, read: Callable[[str], Tensor], key: str) -> Tensor:
    """The tensor that the original layout calls `key`, as stored. `read` takes the file's own names."""
    if file.layout == "original":
        return read(file.stored_key(key))
    return assembled(file, key, [read(file.stored_key(name)) for name, _ in parameters_of(file.dims, key)])


def assembled(file: FluxFile, key: str, parameters: Sequence[Tensor]) -> Tensor:
    """The original tensor `key` out of all the diffusers parameters that are made of it, as diffusers_part gives them:
    a copy."""
    whole = torch.cat(list(parameters))
    swap = file.layout == "diffusers" and parameters_of(file.dims, key)[0][1].swap_halves
    return swapped_halves(whole) if swap else whole


def diffusers_part(file: FluxFile, whole: Tensor, source: Source) -> Tensor:
    """The rows of an original tensor that a diffusers parameter is made of, in the order in which the file's layout has
    them."""
    part = whole[source.start : source.stop]
    return swapped_halves(part) if source.swap_halves and file.layout == "diffusers" else part


def parameters_of(dims: FluxDims, key: str) -> list[tuple[str, Source]]:
    """diffusers' parameters that are made of the original tensor `key`, in the order of its rows."""
    found = [(name, source) for name, source in _sources(dims).items() if source.key == key]
    return sorted(found, key=lambda part: part[1].start or 0)


def swapped_halves(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2, dim=0)
    return torch.cat([second, first], dim=0)
