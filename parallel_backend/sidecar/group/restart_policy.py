"""The crashes of a group's ranks, and whether those were too many to start them again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ...errors import RankFailed
from ...wire.deadlines import BROKEN_WINDOW

FAILURES_UNTIL_BROKEN = 3  # within deadlines.BROKEN_WINDOW


class CrashHistory:
    """The crashes of the last ten minutes; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashes: deque[tuple[float, str | None, RankFailed]] = deque(maxlen=FAILURES_UNTIL_BROKEN)

    def add(self, error: RankFailed, device: str | None) -> None:
        """`device`: of the rank that failed; None where all failed together."""
        self._crashes.append((self._clock(), device, error))

    def clear(self) -> None:
        self._crashes.clear()

    @property
    def count(self) -> int:
        """Crashes within the window that ends now."""
        now = self._clock()
        return sum(now - at < BROKEN_WINDOW for at, _, _ in self._crashes)

    @property
    def is_broken(self) -> bool:
        """Whether FAILURES_UNTIL_BROKEN crashes lie within the window that ends now."""
        return self.count >= FAILURES_UNTIL_BROKEN

    def refusal(self) -> RankFailed:
        """The error for a request to a broken group: the history, and what to do."""
        now = self._clock()
        history = "\n".join(
            f"- {now - at:.0f} s ago, {error.who(device)}: {_first_line(error.cause)}"
            for at, device, error in self._crashes
        )
        devices = {device for _, device, _ in self._crashes}
        only = devices.pop() if len(devices) == 1 else None
        culprit = "Leave the device that fails" if only is None else f"All came from {only}: leave it"
        left = BROKEN_WINDOW - (now - self._crashes[0][0])
        last = self._crashes[-1][2]
        return RankFailed(
            last.rank,
            f"the processes failed {len(self._crashes)} times within {BROKEN_WINDOW / 60:.0f} minutes and are not "
            f"started again by themselves for another {left:.0f} s. {culprit} out in the Strategy Selector's devices, "
            f"look with `python -m parallel_backend doctor`, or press Allow restarts in ComfyUI's sidebar tab Parallel."
            f"\n{history}",
        )


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
