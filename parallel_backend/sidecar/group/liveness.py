"""The signs of life of ranks that have not answered yet: their heartbeats and, on the CPU, their processor time.

A rank that computes for longer than its limit is slow, not stuck: the limit counts from its last sign of life.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from ...devices import is_cpu
from .supervisor import RankGroup

PROBE = 0.5  # s over which a rank's processor time is measured
# The share of PROBE for which a rank that computes has a processor. It gets that much even if the machine has work for
# ten times its cores; a rank that sleeps, or waits in a collective, gets none.
LEAST_SHARE = 0.05
# Extensions in a row for a rank that computes without a heartbeat: limited, since an endless loop computes as well.
MOST_EXTENSIONS = 10


def last_beat(group: RankGroup, pending: Collection[int]) -> float:
    """Returns the time.monotonic() of the latest heartbeat of these ranks."""
    return max(group.heartbeat.read(rank).since for rank in pending)


def is_computing(group: RankGroup, pending: Collection[int]) -> bool:
    """Returns True if one of these ranks computes on the CPU, outside every collective. Takes PROBE seconds.

    Returns False for GPUs: a process that waits for a stuck kernel also keeps its processor busy.
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
    """Returns the processor seconds that a process has used; 0.0 if it is gone."""
    return sum(map(int, _fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def is_stopped(group: RankGroup, rank: int) -> bool:
    """Returns True if the rank's process is stopped by SIGSTOP or a debugger."""
    return _fields(group.pid_of(rank))[:1] in (["T"], ["t"])


def _fields(pid: int | None) -> list[str]:
    """Returns what the kernel says of a process after its name (proc(5), stat), from its state on; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
