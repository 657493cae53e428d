"""Puts idle ranks to sleep, and ends them after a longer time, with one timer and no busy thread.

The timer fires at least every minute while there are ranks, so that changed settings take effect by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock, Timer

from ..errors import Cancelled, ParallelError
from .group.events import Event, RequestEnded, Started
from .group.lease import State
from .sidecar import Sidecar

log = logging.getLogger(__name__)

LOOK_AGAIN = 60.0  # s
_IDLE = (State.READY, State.ASLEEP)


@dataclass(frozen=True)
class Timeouts:
    """Seconds without a request until idle ranks sleep, and until they end; 0: never."""

    sleep_s: float
    stop_s: float


class IdleWatch:
    """The watch over `sidecars()`: it puts idle ones to sleep or ends them. `on_event` is a listener of events.py.

    Ranks that serve a request are left alone.
    """

    def __init__(self, sidecars: Callable[[], Iterable[Sidecar]], timeouts: Callable[[], Timeouts]) -> None:
        self._sidecars, self._timeouts = sidecars, timeouts
        self._lock = Lock()
        self._used: dict[tuple[str, ...], float] = {}  # when the last request of these devices ended
        self._timer: Timer | None = None
        self._runs_out = 0.0

    def on_event(self, event: Event) -> None:
        """Notes when ranks have started, or a request other than a sleep has ended."""
        if isinstance(event, Started) or (isinstance(event, RequestEnded) and event.request != "sleep"):
            with self._lock:
                self._used[event.devices] = time.monotonic()
                self._arm()

    def _arm(self) -> None:
        """Sets the timer to the next due time; one that fires earlier is left alone."""
        if not self._used:
            return
        timeouts, now = self._wished(), time.monotonic()
        due = [
            at + seconds
            for at in self._used.values()
            for seconds in (timeouts.sleep_s, timeouts.stop_s)
            if seconds > 0 and at + seconds > now
        ]
        at = min([now + LOOK_AGAIN, *due])
        if self._timer is not None:
            if self._runs_out <= at:
                return
            self._timer.cancel()
        self._runs_out = at
        self._timer = Timer(at - now, self._look)
        self._timer.daemon = True  # ComfyUI may exit before it fires
        self._timer.start()

    def _wished(self) -> Timeouts:
        """Returns the timeouts, or 'never' if they cannot be read now; the next check reads them again."""
        try:
            return self._timeouts()
        except Exception:
            log.exception("parallel sampling: how long idle processes stay is not known")
            return Timeouts(0.0, 0.0)

    def _look(self) -> None:
        try:
            for sidecar in self._sidecars():
                at, timeouts = self._used.get(sidecar.devices), self._wished()
                if at is not None and sidecar.state in _IDLE:
                    _act(sidecar, time.monotonic() - at, timeouts)
        except Exception:  # the timer must still be set again
            log.exception("parallel sampling: looking after idle processes met an error and goes on")
        living = {sidecar.devices for sidecar in self._sidecars() if sidecar.pids}
        with self._lock:
            self._used = {devices: at for devices, at in self._used.items() if devices in living}
            self._timer = None
            self._arm()


def _act(sidecar: Sidecar, idle_s: float, timeouts: Timeouts) -> None:
    names = ", ".join(sidecar.devices)
    try:
        if 0 < timeouts.stop_s <= idle_s:
            if sidecar.stop_if_idle():
                log.info("parallel sampling: ended the processes on %s, idle for %.0f s", names, idle_s)
        elif 0 < timeouts.sleep_s <= idle_s and sidecar.state is State.READY:
            sidecar.sleep(should_cancel=lambda: sidecar.state not in _IDLE)
            log.info("parallel sampling: put the processes on %s to sleep, idle for %.0f s", names, idle_s)
    except Cancelled:  # a request came meanwhile
        log.info("parallel sampling: the processes on %s are wanted and stay awake", names)
    except ParallelError:
        log.warning("parallel sampling: idle processes on %s did not obey", names, exc_info=True)
