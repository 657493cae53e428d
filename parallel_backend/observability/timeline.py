"""Splits the time of a run's steps on each device into computing, sending, and waiting for another device.

Each rank measures its time inside collectives, with its own or its device's clock (wire/heartbeat.py). No collective
ends before the last rank has joined it. So the rank with the least time in them waited for no other: its time is what
sending takes, and the extra time of the others is waiting. If a strategy has several groups of ranks, this
underestimates sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..requests import RunInfo

SHOWN = 60  # steps that fit in a picture
WORTH_TELLING = 0.1  # share of a step: from it on, the report names the device that the others wait for


class Spent(NamedTuple):
    """Seconds of one step on one rank."""

    computing: float
    sending: float
    waiting: float


def timeline(info: RunInfo) -> tuple[tuple[Spent, ...], ...]:
    """Returns, by rank, the run's last steps that all ranks timed. Empty if a rank reported no times, or if there is
    only one rank."""
    inside = info.inside_seconds
    steps = min(map(len, inside), default=0)
    if len(inside) < 2 or not steps or any(len(times) != steps for times in inside):
        return ()
    took = info.step_seconds[len(info.step_seconds) - steps :]
    least = [min(times) for times in zip(*inside, strict=True)]
    return tuple(
        tuple(
            Spent(max(0.0, step - spent), min(sending, step), max(0.0, min(spent, step) - sending))
            for step, spent, sending in zip(took, times, least, strict=True)
        )
        for times in inside
    )


def rows_of_timeline(
    ranks: Sequence[Sequence[Spent]], devices: Sequence[str]
) -> dict[str, list[dict[str, object]]]:
    """Returns the data of web/lib/timeline.js: each rank's last steps, as seconds of [computing, sending, waiting]."""
    return {
        "ranks": [
            {
                "device": device,
                "steps": [[round(part, 5) for part in spent] for spent in steps[-SHOWN:]],
            }
            for device, steps in zip(devices, ranks, strict=True)
        ]
    }


def in_words(ranks: Sequence[Sequence[Spent]], devices: Sequence[str]) -> list[str]:
    """Returns report lines: shares of all steps, and the device that the others wait for; empty without times."""
    if not any(ranks):
        return []
    every = [spent for steps in ranks for spent in steps]
    computing, sending, waiting = map(sum, zip(*every, strict=True))
    total = computing + sending + waiting
    if total <= 0:
        return []
    lines = [
        f"timeline: devices computed {computing / total:.0%} of the time, sent {sending / total:.0%} and waited for "
        f"each other {waiting / total:.0%}"
    ]
    waits = [sum(spent.waiting for spent in steps) for steps in ranks]
    last = waits.index(min(waits))
    other_waits = [wait for rank, wait in enumerate(waits) if rank != last]
    share = sum(other_waits) / len(other_waits) * len(ranks) / total
    if share >= WORTH_TELLING:
        lines.append(
            f"timeline: the others wait for {devices[last]} during {share:.0%} of each step; with device_shares you "
            f"can give it less"
        )
    return lines
