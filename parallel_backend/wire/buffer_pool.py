"""Copies of tensors in memory that earlier copies have left.

Memory that is new costs more than the copy, since the system clears each page when it is first written
(docs/benchmarks.md). An answer of a video model is as large as the one before, which by then nobody holds.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1 << 20  # bytes of a tensor; malloc gives smaller ones what it has
_MOST = 4  # buffers that are kept: a sampler holds few answers at once


class BufferPool:
    """What `copy` gives is the caller's own, for as long as it wants; its memory is used again once nothing refers to
    it any more."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []  # the one that was used last at the end

    def copy(self, tensor: Tensor) -> Tensor:
        """Of a tensor in host memory."""
        size = tensor.nbytes
        if size < _LEAST:
            return tensor.clone()
        buffer = next((one for one in self._buffers if one.is_free and len(one.memory) == size), None)
        if buffer is None:
            buffer = _Buffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        else:
            self._buffers.remove(buffer)
        self._buffers = [*self._buffers, buffer][-_MOST:]
        return buffer.lend(tensor.dtype).view(tensor.shape).copy_(tensor)

    def release(self) -> None:
        """Keeps nothing any more; what was lent lives on."""
        self._buffers = []


@dataclass(eq=False)
class _Buffer:
    memory: mmap.mmap
    _lent: weakref.ref[memoryview] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    @torch.inference_mode(False)  # what is made under it could not be written outside of it
    def lend(self, dtype: torch.dtype) -> Tensor:
        view = memoryview(self.memory)  # which the tensor's storage holds, and every view of it
        self._lent = weakref.ref(view)
        return torch.frombuffer(view, dtype=torch.uint8).view(dtype)
