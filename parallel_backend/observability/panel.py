"""The status panel of rank groups: states in words, numbers, the time left, and which buttons are useful now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import median

from ..sidecar.group.lease import PhaseKind, State
from ..sidecar.status import GroupStatus, RankStatus
from .gauges import Gauge

BUSY = "a prompt is using the processes; cancel it first"
FAILED_TOO_OFTEN = "they failed too often; press Allow restarts first"
NO_RANKS = "there are no processes; they start with the next prompt, or by Start"
AT_WORK = (State.STARTING.value, State.RUNNING.value)
_COUNTED = (PhaseKind.SAMPLING, PhaseKind.TRYING)  # phases that count steps
WARM = (State.READY.value, State.ASLEEP.value)

FIRST_START = "about 10 s, once"  # 1 s if ComfyUI's libraries are in the page cache, else this long
LEAST_LOADED = 0.05  # share of a file; before it the disk's speed is unknown
_MINUTE, _HOUR = 60, 3600
_LATEST = 9  # steps used to predict the time of the next ones

Shown = dict[str, object]  # an object for json.dumps


def show_groups(
    groups: Iterable[GroupStatus], gauges: Mapping[str, Gauge], left_out: tuple[str, ...] = ()
) -> Shown:
    """Returns {"groups": [...], "left_out": [...]}. `left_out`: the devices that `auto` does not use."""
    return {
        "groups": [_show_group(group, gauges, left_out) for group in groups],
        "left_out": list(left_out),
    }


def show_progress(groups: Iterable[GroupStatus]) -> list[Shown]:
    """Returns a progress bar for each rank of the busy groups."""
    return [
        {**shown, "words": shown["words"] or group_words(group)}
        for group in groups
        if group.state in AT_WORK
        for shown in (_progress(group, rank) for rank in _ranks(group))
    ]


def group_words(status: GroupStatus) -> str:
    """Returns the state in words, such as "step 12 of 28 · about 40 s left"."""
    if status.state == State.RUNNING.value:
        if status.phase is None:
            return "working"
        loaded = sum(rank.loaded for rank in status.ranks) / max(1, len(status.ranks))
        words, _ = _counted(status, loaded, status.step)
        if status.phase.kind is PhaseKind.TRYING:
            return status.phase.text + (f" {status.step}/{status.steps}" if words else "")
        return " · ".join(filter(None, [words or status.phase.text, time_left(status, loaded, status.step)]))
    if status.state == State.STARTING.value:
        return f"starting, {time_left(status, 0.0, 0)}"
    if status.state == State.DOWN.value:
        return "not started"
    return status.state


def why_not(status: GroupStatus, left_out: tuple[str, ...] = ()) -> dict[str, str]:
    """Returns for each button why it would do nothing now; "" if it would do something."""
    state = status.state
    if state in AT_WORK:
        return dict.fromkeys(("sleep", "wake", "restart", "stop", "reset"), BUSY)
    warm = state in WARM
    is_broken = state == State.BROKEN.value
    failing = is_broken or bool(set(left_out) & set(status.devices))
    asleep = state == State.ASLEEP.value
    none = FAILED_TOO_OFTEN if is_broken else NO_RANKS
    return {
        "sleep": none if not warm else "the processes sleep already" if asleep else "",
        "wake": none if not warm else "" if asleep else "the processes are awake",
        "restart": FAILED_TOO_OFTEN if is_broken else "",
        "stop": "" if warm else none,
        "reset": "" if failing else "nothing failed too often",
    }


def _show_group(status: GroupStatus, gauges: Mapping[str, Gauge], left_out: tuple[str, ...]) -> Shown:
    ranks = [
        _progress(status, rank)
        | {
            "rank": rank.rank,
            "pid": rank.pid,
            "weight_bytes": rank.weight_bytes,
            "working_bytes": rank.working_bytes,
            "bytes_sent": rank.sent_bytes,
            "gauge": asdict(gauges[rank.device]) if rank.device in gauges else None,
        }
        for rank in _ranks(status)
    ]
    return {
        "devices": list(status.devices),
        "state": status.state,
        "words": group_words(status),
        "reason": status.reason if status.state in (State.FAILED.value, State.BROKEN.value) else "",
        "models": list(status.models),
        "step_seconds": [round(seconds, 4) for seconds in status.step_seconds],
        "why_not": why_not(status, left_out),
        "ranks": ranks,
    }


def _ranks(status: GroupStatus) -> tuple[RankStatus, ...]:
    """Returns the group's ranks, or an empty rank for each device if there are none or they have ended."""
    if status.ranks and status.state in (*AT_WORK, *WARM):
        return status.ranks
    return tuple(
        RankStatus(False, "", 0, 0, frozenset(), 0.0, rank=rank, device=device)
        for rank, device in enumerate(status.devices)
    )


def _counted(status: GroupStatus, loaded: float, step: int) -> tuple[str, float | None]:
    """Returns what the running request counts in words, and the part that is done; ("", None) if it counts nothing."""
    phase = status.phase
    if phase is not None and phase.kind is PhaseKind.LOADING:
        reading = f"reading {in_gb(phase.size)}" if phase.size else f"loading {100 * loaded:.0f} %"
        return reading if loaded else "importing libraries", round(loaded, 3)
    if phase is None or phase.kind not in _COUNTED or not status.steps:
        return "", None
    done = min(step, status.steps)
    return f"step {done} of {status.steps}", round(done / status.steps, 3)


def _progress(status: GroupStatus, rank: RankStatus) -> Shown:
    """Returns {"device", "words", "progress", "left"}. `progress`: 0 to 1, None if nothing is counted; `left`: the
    remaining time in words, "" if unknown."""
    counts = status.state == State.RUNNING.value and rank.pid is not None
    words, progress = _counted(status, rank.loaded, rank.step) if counts else ("", None)
    left = "" if rank.pid is None else time_left(status, rank.loaded, rank.step)
    return {"device": rank.device, "words": words, "progress": progress, "left": left}


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
