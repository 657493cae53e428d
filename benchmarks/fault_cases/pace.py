"""A process that measures, while a case runs, how much slower it is than on a quiet machine."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

PAUSE, WORK = 0.05, 0.01  # s between two beats; s of processor time for one


class Pace:
    """The slowness of the machine. `slowness`: wall seconds of the slowest beat since the last `reset`, divided by
    those on a quiet machine; at least 1. Limits in seconds are multiplied by it."""

    def __init__(self, slowest: Synchronized[float]) -> None:
        self._slowest = slowest

    @property
    def slowness(self) -> float:
        return max(1.0, self._slowest.value)

    def reset(self) -> None:
        self._slowest.value = 1.0


@contextmanager
def measured_pace() -> Iterator[Pace]:
    slowest = multiprocessing.Value("d", 1.0)
    beating = multiprocessing.get_context("fork").Process(target=_beat, args=(slowest,), daemon=True)
    beating.start()
    try:
        yield Pace(slowest)
    finally:
        beating.kill()
        beating.join()


def _beat(slowest: Synchronized[float]) -> None:
    while True:
        begun = time.perf_counter()
        time.sleep(PAUSE)
        end = time.thread_time() + WORK
        while time.thread_time() < end:
            pass
        took = time.perf_counter() - begun
        slowest.value = max(slowest.value, took / (PAUSE + WORK))
