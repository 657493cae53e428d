"""The folder in the user's cache that ComfyUI's process and the ranks share: measurements, results of self-tests, and
compiled blocks.

Its place follows the XDG Base Directory Specification.
"""

from __future__ import annotations

import os
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
