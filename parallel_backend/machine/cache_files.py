"""The user's cache folder, and JSON files in it that several processes write: one at a time, and each file whole.

What is there is a convenience: a file that is damaged, of another format or unreadable counts as empty, and a disk that
cannot be written to is no error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ..errors import TransportError
from ..wire.strict_json import from_json, parse

FOLDER = "comfyui-parallel-sampling"
VARIABLE = "PARALLEL_SAMPLING_MEASUREMENTS"  # a folder, or `off`
LOCK_PATIENCE = 2.0  # s; another process holds the lock for milliseconds
_POLL = 0.003  # s
MAX_BYTES = 8 * 1024**2  # of a file; the largest that the pack writes is a tenth of it

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")


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


class CacheFile:
    """One JSON file of the cache folder, for any number of processes at once. `path`: None where nothing is to be kept;
    `format`: the number of its layout; a file of another one is written over."""

    def __init__(self, name: str, format: int, folder: Path | None) -> None:
        folder = folder or cache_folder()
        self.path = None if folder is None else folder / name
        self._format = format

    def read_bytes(self) -> bytes:
        """Returns what the file has, for read_frame; nothing where it cannot be read."""
        if self.path is None:
            return b""
        try:
            with self.path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        except OSError:
            return b""

    def replace(self, make_fields: Callable[[], dict[str, object]]) -> bool:
        """Writes a new file, of fields that are made while no other process writes. Returns True if it reached the
        disk, and never raises for the disk's sake."""
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
    """Returns the fields of a file of that format; none where it is damaged, or of another one."""
    try:
        frame = parse(data.decode()) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        frame = None
    return frame if isinstance(frame, dict) and frame.get("format") == format else {}


def read_entries(entries: object, kind: type[Entry]) -> Iterator[Entry]:
    """Yields the entries of a field one by one, so that one which this version does not know costs only itself."""
    for entry in entries if isinstance(entries, list) else []:
        try:
            yield from_json(entry, kind, kind.__name__)
        except TransportError as error:
            log.debug("an entry is left out: %s", error)


def _write_atomically(path: Path, data: bytes) -> None:
    """Writes a whole file or none: readers see the old one until the new one is complete."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
