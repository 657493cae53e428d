"""Meetings of ranks inside a block as operators of torch: a compiled block calls them, and torch never looks inside.

What is inside cannot be compiled: collectives, notes of where a rank is. A break of the
graph would do too, but would cut each block in many. An operator takes tensors and the name of what does the work,
which is known here as long as its owner holds it: names, unlike objects, can stand in what is compiled. Each operator
says that it changes `order`, a tensor that nobody reads: so none is left out, and two in one block keep their order,
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
    """A meeting of the ranks of the tensor axis: `add_up` and `join` of base.Slices, as operators in what is compiled.

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
    with torch.inference_mode(False):  # sharded weights are computed with outside of it
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
