"""Tensors that came, or go, beside a message: the bytes of a sealed memfd, or the places in an arena that it names."""

from __future__ import annotations

import math
import os

from ..errors import TransportError
from ..wire.protocol import Message
from ..wire.transport import DTYPES, MAX_PAYLOAD_BYTES, seal

Extents = tuple[tuple[int, int], ...]  # (offset, bytes), in the order in which they travel


def extents_of(message: Message, size: int) -> Extents:
    """Where the `size` bytes that travel with a message lie. Raises TransportError where it says otherwise."""
    placed = getattr(message, "placed", None)
    if placed is None:
        return ((0, size),)
    found = []
    for tensor in placed:
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None or min((*tensor.shape, tensor.offset), default=0) < 0:
            raise TransportError("a message places a tensor that cannot be")
        found.append((tensor.offset, math.prod(tensor.shape) * dtype.itemsize))
    end = max((offset + length for offset, length in found), default=0)
    if sum(length for _, length in found) != size or end > MAX_PAYLOAD_BYTES:
        raise TransportError(f"a message places other tensors than the {size} bytes that came with it")
    return tuple(found)


def placed_bytes(message: Message, descriptor: int) -> int:
    """Of a local message's payload, that must travel."""
    placed = getattr(message, "placed", None)
    if placed is None:
        return os.fstat(descriptor).st_size
    return sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in placed if t.dtype in DTYPES)


class IncomingPayload:
    """A memfd that takes what comes, and is sealed against any change once all has, as readers want it."""

    def __init__(self, extents: Extents) -> None:
        self._left = [extent for extent in extents if extent[1]]
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("parallel-backend-remote", flags)
        try:
            os.ftruncate(self.descriptor, max(1, *(sum(extent) for extent in ((0, 0), *extents))))
        except BaseException:
            self.close()
            raise

    @property
    def missing(self) -> bool:
        return bool(self._left)

    def write(self, view: memoryview) -> int:
        """How much of `view` was taken."""
        taken = 0
        while self._left and taken < len(view):
            offset, length = self._left[0]
            written = os.pwrite(self.descriptor, view[taken : taken + length], offset)
            taken += written
            self._left[0] = (offset + written, length - written)
            if written == length:
                del self._left[0]
        return taken

    def finish(self) -> int:
        """The descriptor, sealed; the taker closes it."""
        seal(self.descriptor)
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
