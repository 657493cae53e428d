"""The tensors of jobs: numbers of those that the ranks hold, places of those in files that they map, and prints, a few
values of each, to compare the weights that two processes hold."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_VALUES = 64
_SPREAD = 2654435761  # Knuth's multiplier: spreads the positions over the tensor
# Prefix of a refusal; the comma-separated names of weights that the sender has changed follow it.
OTHER_WEIGHTS = "not the file's weights: "
Print = tuple[str, tuple[int, ...], bytes]
# Tensors of ComfyUI's process in host memory that lie on its device in a rank: what a job's code has left there.
OF_DEVICES: WeakIdKeyDictionary = WeakIdKeyDictionary()


class PlaceInFile(NamedTuple):
    """The place of a tensor in a safetensors file that ranks map themselves. `identity`: the file's FileIdentity when
    it was read; `number`: of the tensor object in ComfyUI's process. A rank may have written to its copy, so another
    tensor object with the same values has another number."""

    path: str
    identity: Hashable
    name: str
    number: int


FindInFile = Callable[[Tensor], PlaceInFile | None]


class SentTensors:
    """The numbers of the tensors that the ranks already hold."""

    def __init__(self) -> None:
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> (number, version or copy)
        self._next = 0
        self._dropped: list[int] = []

    def find(self, tensor: Tensor) -> int | None:
        """Returns the number of a tensor that the ranks hold; None if it is new, or was written to since."""
        number, before = self._numbers.get(tensor, (0, None))
        return number if before is not None and _is_still(tensor, before) else None

    def add(self, tensor: Tensor) -> int:
        """Returns the number of a tensor that is sent now."""
        before = self._numbers.get(tensor)
        if before is not None:
            self._dropped.append(before[0])
        self._next += 1
        # Inference tensors, such as prompts, have no version counter: compare with a copy.
        self._numbers[tensor] = (self._next, tensor.clone() if tensor.is_inference() else tensor._version)
        weakref.finalize(tensor, self._forget, self._next)
        return self._next

    def _forget(self, number: int) -> None:
        self._dropped.append(number)

    def take_dropped(self) -> list[int]:
        """Returns the numbers that the ranks may forget, and clears the list."""
        dropped, self._dropped = sorted(set(self._dropped)), []
        return dropped


def _is_still(tensor: Tensor, before: int | Tensor) -> bool:
    if isinstance(before, Tensor):
        return before.shape == tensor.shape and before.dtype == tensor.dtype and torch.equal(before, tensor)
    return not tensor.is_inference() and before == tensor._version


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
