"""Estimates the time that ranks still need, in words, from their progress so far."""

from __future__ import annotations

import time
from statistics import median

from ..sidecar.group.lease import State
from ..sidecar.group.phases import PhaseKind
from ..sidecar.status import GroupStatus

FIRST_START = (
    "about 10 s, once"  # a start takes 1 s if ComfyUI's libraries are in the page cache, else this long
)
LEAST_LOADED = 0.05  # share of a file; before it the disk's speed is unknown
_MINUTE, _HOUR = 60, 3600
_LATEST = 9  # steps used to predict the time of the next ones


def time_left(status: GroupStatus, loaded: float, step: int) -> str:
    """Returns the time that a rank still needs, in words; "" if unknown. `loaded`: share of its file, 0 to 1; `step`:
    finished steps."""
    if status.state == State.STARTING.value:
        return FIRST_START
    if status.state != State.RUNNING.value or status.phase is None:
        return ""
    if status.phase.kind is PhaseKind.LOADING:
        if not LEAST_LOADED <= loaded < 1:
            return ""
        return in_words((time.monotonic() - status.phase.started) * (1 - loaded) / loaded)
    if status.phase.kind is PhaseKind.SAMPLING and 0 < step < status.steps and status.step_seconds:
        return in_words((status.steps - step) * median(status.step_seconds[-_LATEST:]))
    return ""


def in_words(seconds: float) -> str:
    """Rounds up, more for longer times: `about 4 s left`, `about 25 s left`, `about 3 min left`."""
    if seconds <= 10:
        return f"about {max(1, round(seconds))} s left"
    if seconds <= _MINUTE:
        return f"about {5 * -(-seconds // 5):.0f} s left"
    if seconds <= 2 * _HOUR:
        return f"about {-(-seconds // _MINUTE):.0f} min left"
    return f"about {-(-seconds // _HOUR):.0f} h left"


def in_gb(size: int) -> str:
    """Formats a file's size as download pages do, in GB of 10^9 bytes."""
    return f"{size / 1e9:.0f} GB" if size >= 10e9 else f"{size / 1e9:.1f} GB"
