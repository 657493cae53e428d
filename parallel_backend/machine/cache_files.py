"""The JSON files of the user's cache folder: several processes write a file in turn, and readers see a whole file.

The cache is a convenience: a file that is damaged, unreadable or of another format counts as empty, and it is no error
if the disk cannot be written to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import TransportError
from ..wire.cache_folder import cache_folder
from ..wire.strict_json import from_json, parse

LOCK_PATIENCE = 2.0  # s; another process holds the lock for milliseconds
_POLL = 0.003  # s
MAX_BYTES = 8 * 1024**2  # per file; the largest one that the pack writes is a tenth of this

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path` inside the block, so that no other process's update is lost. Raises OSError."""
    import fcntl  # missing on Windows, where ranks do not run but this module must be importable

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


class CacheFile:
    """One JSON file of the cache folder, for any number of processes at once. `path`: None if nothing is to be stored;
    `format`: version of the layout; a file with another one is overwritten."""

    def __init__(self, name: str, format: int, folder: Path | None) -> None:
        folder = folder or cache_folder()
        self.path = None if folder is None else folder / name
        self._format = format

    def read_bytes(self) -> bytes:
        """Returns the contents of the file, for read_frame; empty if it cannot be read."""
        if self.path is None:
            return b""
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError:
            return b""

    def replace(self, make_fields: Callable[[], dict[str, object]]) -> bool:
        """Writes a new file from `make_fields`, which is called while no other process writes. Returns True if the file
        was written; an error of the disk gives False."""
        if self.path is None:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.path.with_suffix(".lock")):
                frame = {"format": self._format, **make_fields()}
                _write_atomically(self.path, json.dumps(frame, allow_nan=False).encode())
        except OSError as error:  # read-only, full, not ours, or locked by a process that hangs
            log.debug("%s is not written: %s", self.path.name, error)
            return False
        return True


def read_frame(data: bytes, format: int) -> dict[str, object]:
    """Returns the fields of a file with this format; empty if it is damaged or has another format."""
    try:
        frame = parse(data.decode()) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        frame = None
    return frame if isinstance(frame, dict) and frame.get("format") == format else {}


def read_entries(entries: object, kind: type[Entry]) -> Iterator[Entry]:
    """Yields the entries of a field; skips those that this version cannot read."""
    for entry in entries if isinstance(entries, list) else []:
        try:
            yield from_json(entry, kind, kind.__name__)
        except TransportError as error:
            log.debug("an entry is left out: %s", error)


def _write_atomically(path: Path, data: bytes) -> None:
    """Writes the file as a whole: readers see the old one until the new one is complete."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
