"""Copies weights from a mapped file to a GPU: large reads into pinned buffers, then copies to the device. A tensor
of any format travels as the plain tensors that it consists of.

Copying straight from the mapping would cost a page fault every few pages, and the driver copies memory that is not
pinned once more. On the CPU weights stay in the mapping (decision 004) and this module is not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import CheckpointError
from .checkpoint import read_header

# Bytes of one buffer. Two are in use at once: large enough for disk and bus, small compared with a model.
PIECE = 32 * 1024**2
# Threads that fill a buffer together: one copies 5 GB/s from the page cache, a fraction of the bus's bandwidth; and
# the fewest bytes that one of them reads.
_READERS, _READ = 4, 1024**2


class StagedReader:
    """Copies tensors of a mapped safetensors file to a device. A context manager: it owns a file and two buffers.

    `opened`: the mapping. `bytes_read`: bytes read through the buffers so far.
    """

    def __init__(
        self, path: str | os.PathLike[str], opened: safe_open, device: torch.device, piece: int = PIECE
    ) -> None:
        header = read_header(path)
        name, entry = next((n, e) for n, e in header.tensors.items() if e.end > e.begin)
        data = header.file_bytes - max(entry.end for entry in header.tensors.values())
        self.bytes_read = 0
        self._name = header.name
        self._base = (
            opened.get_tensor(name).data_ptr() - data - entry.begin
        )  # address of the file's first byte
        self._span = range(data, header.file_bytes + 1)
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._readers = ThreadPoolExecutor(_READERS, "weights")

    def __enter__(self) -> StagedReader:
        return self

    def __exit__(self, *error: object) -> None:
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()  # copies from the buffers may still run
        self._readers.shutdown()
        os.close(self._file)
        self._buffers.clear()

    def to_device(self, mapped: Tensor) -> Tensor:
        """Copies a tensor of the mapping, or rows of one, to the device. Uses Tensor.to for other tensors and for those
        that were written to. Raises CheckpointError if the file became shorter."""
        begin = mapped.data_ptr() - self._base
        in_file = begin in self._span and begin + mapped.nbytes in self._span
        if not (in_file and mapped.is_contiguous() and mapped._version == 0):
            return mapped.to(self._device)
        found = torch.empty_like(mapped, device=self._device)
        target = found.view(-1).view(torch.uint8) if mapped.nbytes else found
        for number, start in enumerate(range(0, mapped.nbytes, len(self._buffers[0]))):
            slot = number % 2
            if (copied := self._copied[slot]) is not None:
                copied.synchronize()  # this buffer is free again
            # Makes the kernel read ahead while this piece is copied.
            os.posix_fadvise(self._file, begin + start, 2 * len(self._buffers[slot]), os.POSIX_FADV_WILLNEED)
            piece = self._buffers[slot][: min(len(self._buffers[slot]), mapped.nbytes - start)]
            self._fill(piece, begin + start)
            target[start : start + len(piece)].copy_(piece, non_blocking=self._on_gpu)
            if self._on_gpu:
                self._copied[slot] = torch.cuda.current_stream(self._device).record_event()
        return found

    def _fill(self, piece: Tensor, position: int) -> None:
        target = memoryview(piece.numpy().data)
        part = max(_READ, -(-len(target) // _READERS))
        starts = range(0, len(target), part)
        parts = [target[start : start + part] for start in starts]
        for got in self._readers.map(self._read, parts, [position + start for start in starts]):
            self.bytes_read += got

    def _read(self, target: memoryview, position: int) -> int:
        done = 0
        while done < len(target):
            got = os.preadv(self._file, [target[done:]], position + done)
            if got == 0:
                raise CheckpointError(
                    f"{self._name} became shorter while it was read. Wait until it is written, and try again."
                )
            done += got
        return done


def staged_reader(
    path: str | os.PathLike[str], opened: safe_open | None, device: torch.device
) -> AbstractContextManager[StagedReader | None]:
    """Opens a reader of weights for a GPU; gives None if weights stay in the mapped file or no file is open."""
    if opened is None or device.type != "cuda":
        return nullcontext()
    return StagedReader(path, opened, device)


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
