"""The crashes of a group's ranks, and whether those were too many to start them again."""

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
    """What is remembered of a crash: not its error, whose traceback would keep the model and the latent of its job."""

    at: float  # s of the history's clock
    rank: int | None  # the one that failed first
    device: str | None  # that of this rank
    line: str


class CrashHistory:
    """The crashes of the last ten minutes; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashes: deque[Crash] = deque(maxlen=FAILURES_UNTIL_BROKEN)

    def add(self, error: RankFailed, device: str | None) -> None:
        """`device`: of the rank that failed; None where all failed together."""
        line = f"{error.who(device)}: {error.summary}"
        self._crashes.append(Crash(self._clock(), error.rank, device, line))

    def clear(self) -> None:
        self._crashes.clear()

    @property
    def count(self) -> int:
        """Crashes within the window that ends now."""
        now = self._clock()
        return sum(now - crash.at < BROKEN_WINDOW for crash in self._crashes)

    @property
    def is_broken(self) -> bool:
        """Whether FAILURES_UNTIL_BROKEN crashes lie within the window that ends now."""
        return self.count >= FAILURES_UNTIL_BROKEN

    def refusal(self) -> RankFailed:
        """The error for a request to a broken group: the history, and what to do."""
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
