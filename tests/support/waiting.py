"""Waiting in tests: for a condition or a coroutine, never for a fixed time, because a busy machine may take any."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0  # s; far more than any awaited condition takes on an idle machine


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Returns once `condition()` is true. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} s"
        time.sleep(0.01)


def run_in_own_loop(coroutine: Coroutine[object, object, T]) -> T:
    """Returns the coroutine's result, like asyncio.run, but in a thread: playwright leaves a loop in that of tests."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
