"""Arms one fault for the ranks that start next (parallel_backend/faults.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel_backend.faults import VARIABLE


@contextmanager
def fault(kind: str, point: str, *, rank: int = 1, step: int = 0, once: Path | None = None) -> Iterator[None]:
    """Inside, ranks that start have the fault; those that started keep it. `once`: a file that must not exist yet."""
    words = {"rank": rank, "step": step, "kind": kind, "point": point, "once": once and str(once)}
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(words)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
