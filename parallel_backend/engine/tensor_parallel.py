"""The collectives of tensor parallelism: they combine the results of the slices on the ranks of the tensor axis.

A compiled block calls them as custom torch operators, which torch does not trace. Their contents cannot be compiled:
collectives, and notes of a rank's position. Graph breaks would work, but would split each block into many graphs. An
operator takes tensors and the name of a SliceMeeting, because compiled code can contain a name but not an object.
`_by_name` finds the meeting as long as its owner keeps it. For `order`, see models/attention.py.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..models.attention import order_of, prepare_order
from ..models.base import Slices
from .comm.collectives import all_gather, all_reduce
from .comm.groups import Axis, Layouts

_by_name: WeakValueDictionary[str, SliceMeeting] = WeakValueDictionary()


def slices_of(axis: Axis, layouts: Layouts) -> Slices | None:
    """Returns this rank's slices of every layer; None if the axis has one rank."""
    if axis.size == 1:
        return None
    if axis.ranks not in layouts.slices:
        meeting = SliceMeeting(axis, layouts.world.device)
        layouts.slices[axis.ranks] = Slices(axis.size, axis.index, meeting.add_up, meeting.join)
    return layouts.slices[axis.ranks]


class SliceMeeting:
    """The collectives of one tensor axis: `add_up` and `join` of base.Slices, as operators in compiled code."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._name = f"processes {axis.ranks}"
        prepare_order(device.type)
        _by_name[self._name] = self

    def add_up(self, partial: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return all_reduce(partial, self._axis)
        _add_up(partial, self._name, order_of(partial))
        return partial

    def join(self, columns: Tensor) -> Tensor:
        """Joins [B, n] of each rank to [B, P * n]."""
        if torch.compiler.is_compiling():
            return _join(columns, self._axis.size, self._name, order_of(columns))
        return all_gather(columns, (columns.shape[1],) * self._axis.size, self._axis, 1)


@torch.library.custom_op(
    "parallel_backend::add_up",
    mutates_args=("partial", "order"),
    schema="(Tensor(a!) partial, str name, Tensor(b!) order) -> ()",
)
def _add_up(partial: Tensor, name: str, order: Tensor) -> None:
    _by_name[name].add_up(partial)


@torch.library.custom_op(
    "parallel_backend::join",
    mutates_args=("order",),
    schema="(Tensor columns, int degree, str name, Tensor(a!) order) -> Tensor",
)
def _join(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    return _by_name[name].join(columns).contiguous()


@_join.register_fake
def _(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    return columns.new_empty(columns.shape[0], columns.shape[1] * degree)
