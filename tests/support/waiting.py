"""Waiting in tests: for a condition, never for a fixed time, because a busy machine may take any time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # s; far more than any awaited condition takes on an idle machine


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once `condition()` is true. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)
