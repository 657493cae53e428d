"""The signs of life of ranks that owe an answer: what they wrote down, and on the CPU whether they compute.

A rank that computes for longer than its limit is slow, not stuck: the limit counts from its last sign of life.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from ...devices import is_cpu
from .supervisor import RankGroup

PROBE = 0.5  # s over which the time on a processor is measured
# Of the probe that a rank must have had a processor. A rank that computes gets that much on a machine with ten times
# more to do than it has cores for; one that sleeps, or waits in a collective, gets none.
LEAST_SHARE = 0.05
# Limits in a row that a rank may compute without writing anything down: an endless loop computes too.
MOST_EXTENSIONS = 10


def last_beat(group: RankGroup, pending: Collection[int]) -> float:
    """time.monotonic() of the last that any of these ranks wrote down."""
    return max(group.heartbeat.read(rank).since for rank in pending)


def is_computing(group: RankGroup, pending: Collection[int]) -> bool:
    """Whether one of these ranks computes on the CPU, outside every collective. Takes PROBE seconds to find out.

    On a GPU a process that waits for a stuck kernel keeps its processor busy, so there it tells nothing.
    """
    if not is_cpu(group.devices):
        return False
    busy = [rank for rank in pending if not group.heartbeat.read(rank).inside]
    before = {rank: _processor_seconds(group.pid_of(rank)) for rank in busy}
    if busy:
        time.sleep(PROBE)
    used = (_processor_seconds(group.pid_of(rank)) - before[rank] for rank in busy)
    return any(seconds >= LEAST_SHARE * PROBE for seconds in used)


def _processor_seconds(pid: int | None) -> float:
    """That a process has used of its processors; 0.0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = map(int, fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")
