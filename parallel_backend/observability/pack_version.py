"""Which version of the pack this is, as its pyproject.toml says."""

from __future__ import annotations

import functools
import re
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@functools.cache
def pack_version(project: Path = _PROJECT) -> str:
    """Such as "0.1.0"; "unknown" where the file is missing."""
    try:
        found = re.search(r'^version = "([^"]+)"$', project.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "unknown"
