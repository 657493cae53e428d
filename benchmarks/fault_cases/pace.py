"""How much slower than alone a process runs now, measured beside a case by one that does nothing else."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized

PAUSE, WORK = 0.05, 0.01  # s between two beats, and of a processor's time for one


class Pace:
    """`slowness`: wall seconds of a beat over those that it takes alone, the slowest since the last `reset`; 1 on a
    quiet machine. A limit in seconds holds times this."""

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
