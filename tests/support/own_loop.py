"""Runs a coroutine in a new event loop on another thread: playwright leaves a loop running in the thread of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def run_in_own_loop(coroutine: Coroutine[object, object, T]) -> T:
    """Returns the result of the coroutine, like asyncio.run."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
