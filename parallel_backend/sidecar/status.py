"""The status of a group of ranks for display: cheap to read at any time, also while the ranks are busy."""

from __future__ import annotations

from dataclasses import dataclass

from .group.phases import Phase
from .group.supervisor import RankGroup


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank. `step`: finished steps of its request; `loaded`: the part of its model that is loaded, 0
    to 1; `weight_bytes`, `working_bytes`: on its device, for weights and for all else; `bytes_sent`: to other ranks
    since it began."""

    rank: int
    device: str
    pid: int | None
    step: int
    loaded: float
    weight_bytes: int
    working_bytes: int
    bytes_sent: int


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
        RankStatus(
            rank=rank,
            device=group.devices[rank],
            pid=group.pid_of(rank),
            step=beat.step,
            loaded=beat.loaded,
            weight_bytes=beat.weight_bytes,
            working_bytes=beat.working_bytes,
            bytes_sent=beat.sent_bytes,
        )
        for rank, beat in enumerate(beats)
    )
