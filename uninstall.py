"""Run by ComfyUI Manager before it deletes this folder: takes away what the pack keeps elsewhere: what it measured
and compiled.

Settings stay in ComfyUI's own file, which knows nothing of packs.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from parallel_backend.machine.cache_files import cache_folder


def remove_measurements(folder: Path | None) -> int:
    """Deletes them and compiled blocks, and the folder if nothing else is in it; returns how many files of measurements
    went. None is no folder."""
    if folder is None or not folder.is_dir():
        return 0
    patterns = ("measurements-*.json", "measurements-*.lock", "self-tests.json", "self-tests.lock")
    found = [file for pattern in patterns for file in folder.glob(pattern)]
    for file in found:
        file.unlink(missing_ok=True)
    shutil.rmtree(folder / "compiled", ignore_errors=True)  # sidecar/process/environment.py
    with contextlib.suppress(OSError):  # somebody else's files are in it
        folder.rmdir()
    return len(found)


if __name__ == "__main__":
    print(f"Parallel Sampling: {remove_measurements(cache_folder())} files of measurements deleted")
