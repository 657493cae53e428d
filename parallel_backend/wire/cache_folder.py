"""This user's folders that ComfyUI's process and the ranks share: a cache with measurements, results of self-tests and
compiled blocks, and a temporary one with locks and sockets.

The cache's place follows the XDG Base Directory Specification. Locks are not in $XDG_RUNTIME_DIR: only logins have it,
services do not, and it is removed at logout, which ranks outlive.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

FOLDER = "comfyui-parallel-sampling"
VARIABLE = "PARALLEL_SAMPLING_MEASUREMENTS"  # a folder, or `off`


def user_cache(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns FOLDER in $XDG_CACHE_HOME, else in ~/.cache; None if there is no home folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the specification says to ignore a relative path
        return Path(base, FOLDER)
    home = environ.get("HOME", "")
    return Path(home, ".cache", FOLDER) if home else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder of measurements: VARIABLE, else user_cache. None, so that nothing is stored, if VARIABLE is
    `off` or there is no home folder."""
    if chosen := environ.get(VARIABLE, ""):
        return None if chosen.lower() == "off" else Path(chosen)
    return user_cache(environ)


def lock_folder() -> Path:
    """Returns FOLDER and the user's number in the temporary folder. Raises PermissionError if another user owns it or
    can write to it, or OSError if it cannot be created."""
    folder = Path(tempfile.gettempdir(), f"{FOLDER}-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            0, "the folder for locks is another user's, or others can write there", str(folder)
        )
    return folder
