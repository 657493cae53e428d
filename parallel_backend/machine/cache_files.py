"""The user's cache folder, and files in it that several processes write: one at a time, and each file whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = "comfyui-parallel-sampling"
VARIABLE = "PARALLEL_SAMPLING_MEASUREMENTS"  # a folder, or `off`
LOCK_PATIENCE = 2.0  # s; another process holds the lock for milliseconds
_POLL = 0.003  # s


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of measurements: $XDG_CACHE_HOME, else ~/.cache (XDG Base Directory); None for nowhere.

    Nowhere is without a home, or where VARIABLE is `off`; any other value of it is the folder itself.
    """
    if chosen := environ.get(VARIABLE, ""):
        return None if chosen.lower() == "off" else Path(chosen)
    base = environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the specification has a relative one ignored
        return Path(base, FOLDER)
    home = environ.get("HOME", "")
    return Path(home, ".cache", FOLDER) if home else None


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
