"""The recent crashes of a group's ranks, and the rule when they are too many to restart the ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import RankFailed
from ...wire.deadlines import BROKEN_WINDOW

FAILURES_UNTIL_BROKEN = 3  # within deadlines.BROKEN_WINDOW


@dataclass(frozen=True, slots=True)
class Crash:
    """The record of a crash. It has no exception: a traceback would keep the model and the latent of the job alive."""

    at: float  # seconds of CrashHistory's clock
    rank: int | None  # the one that failed first
    device: str | None  # the one of `rank`
    line: str


class CrashHistory:
    """The crashes of the last ten minutes. `clock`: a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashes: deque[Crash] = deque(maxlen=FAILURES_UNTIL_BROKEN)

    def add(self, error: RankFailed, device: str | None) -> None:
        """Records a crash. `device`: of the rank that failed, None if all failed together."""
        line = f"{error.who(device)}: {error.summary}"
        self._crashes.append(Crash(self._clock(), error.rank, device, line))

    def clear(self) -> None:
        self._crashes.clear()

    @property
    def count(self) -> int:
        """The number of crashes in the last BROKEN_WINDOW seconds, FAILURES_UNTIL_BROKEN at most."""
        now = self._clock()
        return sum(now - crash.at < BROKEN_WINDOW for crash in self._crashes)

    @property
    def is_broken(self) -> bool:
        """True if there were FAILURES_UNTIL_BROKEN crashes in the last BROKEN_WINDOW seconds."""
        return self.count >= FAILURES_UNTIL_BROKEN

    def refusal(self) -> RankFailed:
        """Returns the error for a request to a broken group: the crashes, and what to do."""
        now = self._clock()
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
