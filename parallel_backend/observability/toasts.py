"""Notifications on ComfyUI's page: ranks started, failed too often, or devices left out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..sidecar.group.events import Event, Recovering, RequestEnded, RequestFailed, Started
from ..sidecar.group.failures import FAILING, left_out

_BRIEF, _LONGER = 4000, 15_000  # ms


@dataclass(frozen=True)
class Toast:
    """A notification. `severity`: success, warn or error; `life`: milliseconds, None until it is dismissed or its cause
    is gone; `about`: its topic: the page first removes an older toast with the same one."""

    severity: str
    summary: str
    detail: str
    life: int | None = None
    about: str = ""


class Notifier:
    """Turns events (`on_event` is a listener of sidecar/group/events.py) into toasts, and passes them to `show`."""

    def __init__(self, show: Callable[[Toast], None]) -> None:
        self._show = show
        self._left_out: frozenset[str] = frozenset()  # devices that a toast has named
        self._lock = threading.Lock()

    def on_event(self, event: Event) -> None:
        names = ", ".join(event.devices)
        if isinstance(event, Started) and event.after:
            words = f"On {names}, after: {event.after}"
            self._show(Toast("warn", "Processes started again", words, _LONGER, names))
        elif isinstance(event, Recovering):
            self._show(Toast("warn", "A process died; starting again", event.words, about=names))
        elif isinstance(event, Started):
            words = f"On {names}, in {event.seconds:.1f} s"
            self._show(Toast("success", "Processes started", words, _BRIEF, names))
        elif isinstance(event, RequestFailed) and event.broken:
            who = "all processes" if event.rank is None else f"process {event.rank} on {event.device}"
            words = (
                f"On {names}; last {who}: {event.cause}. They are not started again by themselves for now: look with "
                f"the doctor, or press Allow restarts in the sidebar tab Parallel."
            )
            self._show(Toast("error", "The processes failed too often", words, about=names))
        if isinstance(event, (RequestFailed, RequestEnded)):
            self._look_for_failing(event.devices)

    def _look_for_failing(self, devices: tuple[str, ...]) -> None:
        with self._lock:
            failing = frozenset(FAILING.among(devices))
            fresh = sorted(failing - self._left_out)
            self._left_out = (self._left_out - frozenset(devices)) | failing
        if fresh:
            self._show(Toast("warn", "A device is left out", f"{left_out(fresh)}.", _LONGER))
