"""Files in the user's cache folder that several processes write: one at a time, and each file whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_PATIENCE = 2.0  # s; another process holds the lock for milliseconds
_POLL = 0.003  # s


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock while the block runs, so that no other process's update is lost. Raises OSError."""
    import fcntl  # not on Windows, where ranks do not run but this module must load

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL)
        yield
    finally:
        os.close(descriptor)


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a whole file or none: readers see the old one until the new one is complete."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
