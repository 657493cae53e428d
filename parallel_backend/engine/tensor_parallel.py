"""The collectives of tensor parallelism: they combine the results of the slices on the ranks of the tensor axis."""

from __future__ import annotations

from torch import Tensor

from ..models.base import Slices
from .comm.collectives import all_gather, all_reduce
from .comm.groups import Axis, Layouts
from .comm.operators import SliceMeeting


def slices_of(axis: Axis, layouts: Layouts) -> Slices | None:
    """Returns this rank's slices of every layer; None if the axis has one rank."""
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
        """Joins [B, n] of each rank to [B, P * n]; sends the transposed tensor, columns first."""
        sizes = (columns.shape[1],) * axis.size
        return all_gather(columns.T, sizes, axis, traffic).T

    return SliceMeeting(f"processes {axis.ranks}", axis.size, layouts.world.device, add_up, join)
