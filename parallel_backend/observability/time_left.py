"""How long the ranks will still need, as a person says it: estimated from what is behind them."""

from __future__ import annotations

import time
from statistics import median

from ..sidecar.group.lease import State
from ..sidecar.group.phases import PhaseKind
from ..sidecar.status import GroupStatus

FIRST_START = (
    "about 10 s, once"  # a start takes 1 s where ComfyUI's libraries are in the page cache, else that
)
LEAST_LOADED = 0.05  # of a file; before it nobody knows how fast the disk is
_MINUTE, _HOUR = 60, 3600
_LATEST = 9  # steps that tell how fast the next ones will be


def time_left(status: GroupStatus, loaded: float, step: int) -> str:
    """Says how long a rank still needs that has `loaded` 0 to 1 of its file and done `step` steps; "" where nobody can
    know."""
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
    """Rounds up, the more the longer it takes: `about 4 s left`, `about 25 s left`, `about 3 min left`."""
    if seconds <= 10:
        return f"about {max(1, round(seconds))} s left"
    if seconds <= _MINUTE:
        return f"about {5 * -(-seconds // 5):.0f} s left"
    if seconds <= 2 * _HOUR:
        return f"about {-(-seconds // _MINUTE):.0f} min left"
    return f"about {-(-seconds // _HOUR):.0f} h left"


def in_gb(size: int) -> str:
    """Says a file's size as shops and download pages do, in GB of 10^9 bytes."""
    return f"{size / 1e9:.0f} GB" if size >= 10e9 else f"{size / 1e9:.1f} GB"
