"""Where the time of a run's steps went on each device: computing, sending, waiting for another device.

A rank's own clock, or its device's, takes the time that it is inside collectives (wire/heartbeat.py). None ends before
the last rank is there, so the rank that spent the least in them waited for nobody: that is what sending takes,
and what the others spent beyond it is waiting for it. With groups of ranks in a strategy this is an estimate from below
of what sending takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ..requests import RunInfo

SHOWN = 60  # steps that a picture has room for
WORTH_TELLING = 0.1  # of a step: the wait for a slower device that is named


@dataclass(frozen=True)
class Spent:
    """Seconds of one step on one rank."""

    computing: float
    sending: float
    waiting: float


def joined(runs: Sequence[RunInfo]) -> RunInfo:
    """The latest of these runs; in ComfyUI's loop, where each model call is one, with the like ones before it."""
    last = runs[-1]
    comparable: list[RunInfo] = []
    for run in reversed(runs):
        like = (run.strategy, len(run.inside_seconds)) == (last.strategy, len(last.inside_seconds))
        if not like or {len(run.step_seconds), *map(len, run.inside_seconds)} != {1}:
            break
        comparable.insert(0, run)
    if len(comparable) < 2:
        return last
    every = zip(*(run.inside_seconds for run in comparable), strict=True)
    return replace(
        last,
        step_seconds=tuple(seconds for run in comparable for seconds in run.step_seconds),
        inside_seconds=tuple(tuple(seconds for times in rank for seconds in times) for rank in every),
    )


def timeline(info: RunInfo) -> tuple[tuple[Spent, ...], ...]:
    """By rank, then by step, of the steps that were timed on all ranks: the last ones of the run. Empty where a rank
    told no times, or there is one rank."""
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
    """For web/lib/timeline.js: the last steps of each rank, seconds of [computing, sending, waiting]."""
    return {
        "ranks": [
            {
                "device": device,
                "steps": [[round(part, 5) for part in astuple(spent)] for spent in steps[-SHOWN:]],
            }
            for device, steps in zip(devices, ranks, strict=True)
        ]
    }


def in_words(ranks: Sequence[Sequence[Spent]], devices: Sequence[str]) -> list[str]:
    """Lines for the report: shares of all steps, and for whom the others wait; none without times."""
    if not ranks:
        return []
    computing, sending, waiting = (
        sum(getattr(spent, part) for steps in ranks for spent in steps)
        for part in ("computing", "sending", "waiting")
    )
    whole = computing + sending + waiting
    if whole <= 0:
        return []
    lines = [
        f"timeline: devices computed {computing / whole:.0%} of the time, sent {sending / whole:.0%} and waited for "
        f"each other {waiting / whole:.0%}"
    ]
    waits = [sum(spent.waiting for spent in steps) for steps in ranks]
    last = waits.index(min(waits))
    others = [wait for rank, wait in enumerate(waits) if rank != last]
    share = sum(others) / len(others) * len(ranks) / whole
    if share >= WORTH_TELLING:
        lines.append(
            f"timeline: the others wait for {devices[last]} during {share:.0%} of each step; with device_shares you "
            f"can give it less"
        )
    return lines
