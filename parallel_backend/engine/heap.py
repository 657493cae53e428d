"""The C library's heap, which keeps what was freed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def release_heap() -> None:
    """Gives free memory back to the system, where the C library can: ranks on a CPU keep it between model calls
    (sidecar/environment.py)."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
