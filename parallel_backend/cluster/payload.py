"""Tensors that come beside a message from another machine: the bytes of a sealed memfd."""

from __future__ import annotations

import os

from ..wire.transport import seal


class IncomingPayload:
    """A memfd that takes what comes, and is sealed against any change once all has, as readers want it."""

    def __init__(self, size: int) -> None:
        self._size, self._written = size, 0
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("parallel-backend-remote", flags)
        try:
            os.ftruncate(self.descriptor, max(1, size))
        except BaseException:
            self.close()
            raise

    @property
    def missing(self) -> bool:
        return self._written < self._size

    def write(self, view: memoryview) -> int:
        """How much of `view` was taken."""
        taken = 0
        while self.missing and taken < len(view):
            part = view[taken : taken + self._size - self._written]
            written = os.pwrite(self.descriptor, part, self._written)
            taken += written
            self._written += written
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
