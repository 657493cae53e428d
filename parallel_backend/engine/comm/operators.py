"""Collectives inside a block as custom torch operators: a compiled block calls them, and torch does not trace them.

Their contents cannot be compiled: collectives, and notes of a rank's position. Graph breaks would work, but would split
each block into many graphs. An operator takes tensors and the name of a SliceMeeting, because compiled code can contain
a name but not an object. `_by_name` finds the meeting as long as its owner keeps it. Each operator declares that it
changes `order`, a tensor that nothing reads. So torch drops no call and keeps the calls of one block in their order,
which must be the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_by_name: WeakValueDictionary[str, SliceMeeting] = WeakValueDictionary()


class SliceMeeting:
    """The collectives of the tensor axis: `add_up` and `join` of base.Slices, as operators in compiled code.

    `join` gives `degree` times as many columns.
    """

    def __init__(
        self,
        name: str,
        degree: int,
        device: torch.device,
        add_up: Callable[[Tensor], Tensor],
        join: Callable[[Tensor], Tensor],
    ) -> None:
        self.sum, self.joined = add_up, join
        self._name = name
        self._degree = degree
        self._order = _order_on(device.type)
        _by_name[name] = self

    def add_up(self, partial: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.sum(partial)
        _add_up(partial, self._name, self._order)
        return partial

    def join(self, columns: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.joined(columns)
        return _join(columns, self._degree, self._name, self._order)


@functools.cache
def _order_on(device_type: str) -> Tensor:
    with torch.inference_mode(False):  # blocks with sharded weights run outside of inference mode
        return torch.zeros(1, device=device_type)


@torch.library.custom_op(
    "parallel_backend::add_up",
    mutates_args=("partial", "order"),
    schema="(Tensor(a!) partial, str name, Tensor(b!) order) -> ()",
)
def _add_up(partial: Tensor, name: str, order: Tensor) -> None:
    _by_name[name].sum(partial)


@torch.library.custom_op(
    "parallel_backend::join",
    mutates_args=("order",),
    schema="(Tensor columns, int degree, str name, Tensor(a!) order) -> Tensor",
)
def _join(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    return _by_name[name].joined(columns).contiguous()


@_join.register_fake
def _(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    return columns.new_empty(columns.shape[0], columns.shape[1] * degree)
