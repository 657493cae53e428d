"""Run by ComfyUI Manager before it deletes this folder: takes away what the pack keeps elsewhere: what it measured
and compiled.

Settings stay in ComfyUI's own file, which knows nothing of packs.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from parallel_backend.wire.cache_folder import cache_folder, user_cache


def remove_measurements(folder: Path) -> int:
    """Deletes them, and the folder if nothing else is in it; returns how many files went."""
    # Older versions kept JSON files under these names.
    found = [*folder.glob("measurements-*.*"), *folder.glob("self-tests.*")]
    for file in found:
        file.unlink(missing_ok=True)
    _remove_if_empty(folder)
    return len(found)


def remove_compiled(folder: Path) -> None:
    """Deletes compiled blocks, and the folder if nothing else is in it."""
    shutil.rmtree(folder / "compiled", ignore_errors=True)  # sidecar/process/environment.py
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's files are in it, or there is no such folder
        folder.rmdir()


if __name__ == "__main__":
    # A person may keep measurements in another folder, or none; compiled blocks are always in the user's cache.
    compiled, measured = user_cache(), cache_folder()
    if compiled is not None:
        remove_compiled(compiled)
    count = 0 if measured is None else remove_measurements(measured)
    print(f"Parallel Sampling: {count} files of measurements deleted")
