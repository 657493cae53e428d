"""Tensor parallelism's meeting points: how the ranks of the tensor axis put their slices' results together."""

from __future__ import annotations

from torch import Tensor

from ..models.base import Slices
from .comm.collectives import all_gather, all_reduce
from .comm.groups import Axis, Layouts
from .comm.operators import SliceMeeting


def slices_of(axis: Axis, layouts: Layouts) -> Slices | None:
    """This rank's slices of every layer; None where the axis has one rank."""
    if axis.size == 1:
        return None
    if axis.ranks not in layouts.meetings:
        layouts.meetings[axis.ranks] = _meeting(axis, layouts)
    meeting = layouts.meetings[axis.ranks]
    return Slices(axis.size, axis.index, meeting.add_up, meeting.join)


def _meeting(axis: Axis, layouts: Layouts) -> SliceMeeting:
    traffic = layouts.traffic

    def add_up(partial: Tensor) -> Tensor:
        return all_reduce(partial, axis, traffic)

    def join(columns: Tensor) -> Tensor:
        """[B, n] of each rank -> [B, P * n]; columns go first on the wire."""
        sizes = (columns.shape[1],) * axis.size
        return all_gather(columns.T, sizes, axis, traffic).T

    return SliceMeeting(f"processes {axis.ranks}", axis.size, layouts.world.device, add_up, join)
