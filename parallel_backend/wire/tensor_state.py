"""The state of a tensor, by which one that is the same as before is known without looking at its numbers."""

from __future__ import annotations

import weakref

from torch import Tensor

State = tuple[object, ...]


def state_of(tensor: Tensor) -> State | None:
    """Another one once the tensor was written into; None where nobody counts what is written (inference mode)."""
    if tensor.is_inference():
        return None
    return (tensor._version, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


class SeenTensor:
    """A tensor as it was when it was last looked at; it may go meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        self._state = state_of(tensor)
        self._tensor = weakref.ref(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether this is `tensor`, and nobody has written into it."""
        return self._state is not None and self._tensor() is tensor and self._state == state_of(tensor)
