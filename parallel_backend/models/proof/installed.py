"""Finds the ComfyUI that a command examines, its version and the digests of its classes, without importing it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..tokens.table import TABLE
from .states import entry_digest

VARIABLE = "COMFYUI_PATH"


def find_folder() -> Path | None:
    """Returns ComfyUI's folder: the one in VARIABLE, else the one that contains this pack; None if there is none."""
    named = os.environ.get(VARIABLE)
    candidates = [Path(named).expanduser()] if named else list(Path(__file__).resolve().parents)
    for folder in candidates:
        if (folder / "comfy" / "cli_args.py").is_file():
            return folder.resolve()
    return None


def version_in(root: Path) -> str:
    """Returns the version in this ComfyUI's sources, or "of an unknown version" if they have none."""
    try:
        found = re.search(r'version__ *= *"([^"]+)"', (root / "comfyui_version.py").read_text())
    except OSError:
        found = None
    return found[1] if found else "of an unknown version"


def digests_in(root: Path) -> dict[str, str]:
    """Returns the entry_digest() of each class of the table whose sources can be read in this ComfyUI."""
    digests: dict[str, str] = {}
    for name in sorted(TABLE):
        try:
            digests[name] = entry_digest(str(root), name)
        except (OSError, SyntaxError, ValueError):
            continue
    return digests
