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
        kind = status.phase and status.phase.kind
        if kind is PhaseKind.LOADING and status.ranks:
            loaded = sum(rank.loaded for rank in status.ranks) / len(status.ranks)
            return _with_time(_loading(status, loaded), time_left(status, loaded, 0))
        if status.phase is None:
            return "working"
        if kind is PhaseKind.SAMPLING and status.steps:
            return _with_time(_counted(status, status.step), time_left(status, 1.0, status.step))
        counted = f" {status.step}/{status.steps}" if status.steps and kind in _COUNTED else ""
        return status.phase.text + counted
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


def _loading(status: GroupStatus, loaded: float) -> str:
    if not loaded:
        return "importing libraries"
    size = status.phase.size if status.phase is not None else 0
    return f"reading {in_gb(size)}" if size else f"loading {100 * loaded:.0f} %"


def _counted(status: GroupStatus, step: int) -> str:
    return f"step {min(step, status.steps)} of {status.steps}"


def _with_time(words: str, left: str) -> str:
    return f"{words} · {left}" if left else words


def _progress(status: GroupStatus, rank: RankStatus) -> Shown:
    """Returns {"device", "words", "progress", "left"}. `progress`: 0 to 1, None if nothing is counted; `left`: the
    remaining time in words, "" if unknown."""
    words, progress = "", None
    kind = status.phase and status.phase.kind
    if status.state == State.RUNNING.value and rank.pid is not None:
        if kind is PhaseKind.LOADING:
            words, progress = _loading(status, rank.loaded), round(rank.loaded, 3)
        elif kind in _COUNTED and status.steps:
            step = min(rank.step, status.steps)
            words, progress = _counted(status, step), round(step / status.steps, 3)
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
