"""The status of a group of ranks for display: cheap to read at any time, also while the ranks are busy."""

from __future__ import annotations

from dataclasses import dataclass

from ..wire.heartbeat import RankBeat
from .group.lease import Phase
from .group.supervisor import RankGroup


@dataclass(frozen=True)
class RankStatus(RankBeat):
    """The latest beat of a rank, its device and its process."""

    rank: int = 0
    device: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class GroupStatus:
    """The ranks of one device set.

    `state`: one of State's values; `reason`: the last failure, "" for none; `phase`: of the running request, None for
    none; `models`: the names of the held files, the most recently used first; `step` of `steps`, 0 outside a sampling
    job; `step_seconds`: of the latest steps of this job or the previous one; `ranks`: empty if there are none.
    """

    devices: tuple[str, ...]
    state: str
    reason: str
    phase: Phase | None
    models: tuple[str, ...]
    step: int
    steps: int
    step_seconds: tuple[float, ...]
    ranks: tuple[RankStatus, ...]


def read_ranks(group: RankGroup | None) -> tuple[RankStatus, ...]:
    """Returns the ranks' latest heartbeats; empty once they are gone."""
    if group is None:
        return ()
    try:
        beats = [group.heartbeat.read(rank) for rank in range(group.world_size)]
    except ValueError:  # the page was closed meanwhile
        return ()
    return tuple(
        RankStatus(**vars(beat), rank=rank, device=device, pid=group.pid_of(rank))
        for rank, (beat, device) in enumerate(zip(beats, group.devices, strict=True))
    )
