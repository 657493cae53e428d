"""The tensors of jobs: numbers of those that the ranks hold, and places of those in files that they map."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

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
