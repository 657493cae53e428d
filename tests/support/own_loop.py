"""A coroutine in a loop of its own, whatever the thread of the tests runs: playwright leaves one behind in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_own_loop(coroutine: Coroutine[object, object, T]) -> T:
    """As asyncio.run."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
