"""The recent crashes of a group's ranks, and when they are too many to start it again; and devices whose ranks failed
more than once in recent minutes, in any group: `auto` leaves them out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...devices import is_cpu, machine_of
from ...errors import RankFailed
from ...wire.deadlines import BROKEN_WINDOW
from ..cluster import head as clusters

FAILURES_UNTIL_BROKEN, FAILURES_UNTIL_LEFT_OUT = 3, 2  # within deadlines.BROKEN_WINDOW


@dataclass(frozen=True, slots=True)
class Crash:
    """The record of a crash. It has no exception: a traceback would keep the model and the latent of the job alive."""

    at: float  # time.monotonic()
    rank: int | None  # the one that failed first
    device: str | None  # the one of `rank`
    line: str


class CrashHistory:
    """The crashes of the last ten minutes."""

    def __init__(self) -> None:
        self._crashes: deque[Crash] = deque(maxlen=FAILURES_UNTIL_BROKEN)

    def add(self, error: RankFailed, device: str | None) -> None:
        """Records a crash. `device`: of the rank that failed, None if all failed together."""
        line = f"{error.who(device)}: {error.summary}"
        self._crashes.append(Crash(time.monotonic(), error.rank, device, line))

    def clear(self) -> None:
        self._crashes.clear()

    @property
    def count(self) -> int:
        """The number of crashes in the last BROKEN_WINDOW seconds, FAILURES_UNTIL_BROKEN at most."""
        now = time.monotonic()
        return sum(now - crash.at < BROKEN_WINDOW for crash in self._crashes)

    @property
    def is_broken(self) -> bool:
        """True if there were FAILURES_UNTIL_BROKEN crashes in the last BROKEN_WINDOW seconds."""
        return self.count >= FAILURES_UNTIL_BROKEN

    def refusal(self) -> RankFailed:
        """Returns the error for a request to a broken group: the crashes, and what to do."""
        now = time.monotonic()
        history = "\n".join(f"- {now - crash.at:.0f} s ago, {crash.line}" for crash in self._crashes)
        devices = {crash.device for crash in self._crashes}
        only = devices.pop() if len(devices) == 1 else None
        culprit = "Leave the device that fails" if only is None else f"All came from {only}: leave it"
        left = BROKEN_WINDOW - (now - self._crashes[0].at)
        return RankFailed(
            self._crashes[-1].rank,
            f"the processes failed {len(self._crashes)} times within {BROKEN_WINDOW / 60:.0f} minutes and are not "
            f"started again by themselves for another {left:.0f} s. {culprit} out in the Strategy Selector's devices, "
            f"look with `python -m parallel_backend doctor`, or press Allow restarts in ComfyUI's sidebar tab Parallel."
            f"\n{history}",
        )


class FailingDevices:
    """The failures of each device in this process; thread-safe."""

    def __init__(self) -> None:
        self._failures: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, device: str, failures: int = 1) -> None:
        """Records that a rank on `device` failed; several `failures` at once for a device that no longer exists."""
        with self._lock:
            self._failures.setdefault(device, []).extend([time.monotonic()] * failures)

    def clear(self) -> None:
        with self._lock:
            self._failures.clear()

    def among(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Returns the `devices` to leave out, none if that were all of them. CPU ranks share one
        device, so there only absent machines count."""
        absent = tuple(device for device in devices if clusters.departure_reason(device))
        if is_cpu(devices):
            return absent if len(absent) < len(devices) else ()
        now = time.monotonic()
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
