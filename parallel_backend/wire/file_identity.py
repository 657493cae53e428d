"""The identity of a model file, to check that a path still leads to the file that a job began with."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointError

_MOST_READ = 100 * 1000**2  # bytes, the largest safetensors header
_PREFIX = struct.Struct("<Q")  # the length of a safetensors header
_FIRST = 1 << 16  # bytes to read of a file in another format


@dataclass(frozen=True)
class FileIdentity:
    """The state of a file at one moment. `device`, `inode`: its place on the disk; `size`: bytes; `mtime_ns`: time of
    the last change, in ns; `header`: SHA-256 of its first bytes, which are the whole header of a safetensors file."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    header: str

    def is_place_of(self, other: FileIdentity) -> bool:
        """True if both are one file on the disk, whatever it contains."""
        return (self.device, self.inode) == (other.device, other.inode)


def read_identity(path: str | Path) -> FileIdentity:
    """Returns the identity of the file at `path`. Raises CheckpointError if it cannot be read or is no regular file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is no regular file; choose a model file.")
            digest = hashlib.sha256(read_header(file, status.st_size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, digest.hexdigest())


def find_identity(path: str | Path) -> FileIdentity | None:
    """Returns the identity of the file at `path`; None if it cannot be read."""
    try:
        return read_identity(path)
    except CheckpointError:
        return None


def read_header(file: BinaryIO, size: int) -> bytes:
    """Returns the first bytes of a file of `size` bytes: the whole header if it is a safetensors file."""
    prefix = file.read(_PREFIX.size)
    (length,) = _PREFIX.unpack(prefix) if len(prefix) == _PREFIX.size else (0,)
    return prefix + file.read(length if length <= min(size, _MOST_READ) else _FIRST)


def check_same(path: str | Path, pinned: FileIdentity) -> None:
    """Raises CheckpointError if `path` no longer leads to a job's file, when the devices must read it again."""
    change, _ = _compare(path, pinned)
    if change:
        raise CheckpointError(
            f"{change}, and the devices have to read it: the job ends here rather than go on with other weights. Run "
            f"the prompt again; it takes the file that is there then."
        )


def result_note(path: str | Path, pinned: FileIdentity) -> str:
    """Says what a change of the file means for the result of a finished job; "" if there was none."""
    change, in_place = _compare(path, pinned)
    if not change:
        return ""
    if in_place:
        return f"{change}, so the result may be of both contents: run the prompt again"
    return f"{change}; the result is of the file that it began with"


def _compare(path: str | Path, pinned: FileIdentity) -> tuple[str, bool]:
    """Returns (the change in words, "" for none; True if the file that the devices have mapped was written to)."""
    name, found = Path(path).name, find_identity(path)
    if found is None:
        return f"{name} was removed while the job ran", False
    if found == pinned:
        return "", False
    if found.is_place_of(pinned):
        return f"{name} was changed in place while the job ran", True
    return f"{name} was replaced by another file while the job ran", False
