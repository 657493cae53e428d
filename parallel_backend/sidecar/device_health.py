"""Devices whose ranks failed more than once lately, in any group: `auto` goes on without them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..devices import is_cpu
from ..wire.deadlines import BROKEN_WINDOW

FAILURES_UNTIL_LEFT_OUT = 2  # within deadlines.BROKEN_WINDOW


class FailingDevices:
    """The failures of this process by device. Any thread; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, device: str, failures: int = 1) -> None:
        """A rank on `device` failed. Several `failures` at once: a device that is not there any more."""
        with self._lock:
            self._failures.setdefault(device, []).extend([self._clock()] * failures)

    def clear(self) -> None:
        with self._lock:
            self._failures.clear()

    def among(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Those of `devices` to leave out: none where nothing would be left, none on the CPU, whose ranks share it."""
        if is_cpu(devices):
            return ()
        now = self._clock()
        with self._lock:
            recent = {d: sum(now - at < BROKEN_WINDOW for at in self._failures.get(d, ())) for d in devices}
        failing = tuple(d for d in devices if recent[d] >= FAILURES_UNTIL_LEFT_OUT)
        return failing if len(failing) < len(devices) else ()


FAILING = FailingDevices()


def left_out(failing: Sequence[str]) -> str:
    """The line of a report on them."""
    return (
        f"{', '.join(failing)} left out: ranks there failed at least {FAILURES_UNTIL_LEFT_OUT} times in the last "
        f"{BROKEN_WINDOW / 60:.0f} minutes. Look with the doctor; Try again in ComfyUI's sidebar tab Parallel "
        f"takes it back at once"
    )
