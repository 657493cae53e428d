"""Devices whose ranks failed more than once in recent minutes, in any group: `auto` leaves them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ...devices import is_cpu, machine_of
from ...wire.deadlines import BROKEN_WINDOW
from ..cluster import head as clusters

FAILURES_UNTIL_LEFT_OUT = 2  # within deadlines.BROKEN_WINDOW


class FailingDevices:
    """The failures of each device in this process; thread-safe. `clock`: a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, device: str, failures: int = 1) -> None:
        """Records that a rank on `device` failed; several `failures` at once for a device that no longer exists."""
        with self._lock:
            self._failures.setdefault(device, []).extend([self._clock()] * failures)

    def clear(self) -> None:
        with self._lock:
            self._failures.clear()

    def among(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Returns the `devices` to leave out, none if that were all of them. CPU ranks share one
        device, so there only absent machines count."""
        absent = tuple(device for device in devices if clusters.departure_reason(device))
        if is_cpu(devices):
            return absent if len(absent) < len(devices) else ()
        now = self._clock()
        with self._lock:
            recent = {d: sum(now - at < BROKEN_WINDOW for at in self._failures.get(d, ())) for d in devices}
        failing = tuple(d for d in devices if recent[d] >= FAILURES_UNTIL_LEFT_OUT or d in absent)
        return failing if len(failing) < len(devices) else ()


FAILING = FailingDevices()


def left_out(failing: Sequence[str]) -> str:
    """Returns the line of a report on devices that are left out."""
    absent = {machine_of(d): words for d in failing if (words := clusters.departure_reason(d))}
    parts = [f"machine {name} left out until it is back: {words}" for name, words in absent.items()]
    if often := [device for device in failing if machine_of(device) not in absent]:
        parts.append(
            f"{', '.join(often)} left out: processes there failed at least {FAILURES_UNTIL_LEFT_OUT} times in the last "
            f"{BROKEN_WINDOW / 60:.0f} minutes. Look with the doctor; Allow restarts in ComfyUI's sidebar tab Parallel "
            f"takes it back at once"
        )
    return "; ".join(parts)
