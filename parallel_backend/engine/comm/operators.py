"""Meetings of ranks inside a block as operators of torch: a compiled block calls them, and torch never looks inside.

What is inside cannot be compiled: collectives, notes of where a rank is, keys that PipeFusion keeps. A break of the
graph would do too, but would cut each block in many. An operator takes tensors and the name of what does the work,
which is known here as long as its owner holds it: names, unlike objects, can stand in what is compiled. Each operator
says that it changes `order`, a tensor that nobody reads: so none is left out, and two in one block keep their order,
which must be the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...models.base import Attention

_by_name: WeakValueDictionary[str, AttentionOperator | SliceMeeting] = WeakValueDictionary()


class AttentionOperator:
    """Stands before the attention of each model call (base.Attention), for compiled blocks.

    `uncompiled`: how often a block called it that ran as plain Python: what is compiled calls the operator alone.
    """

    def __init__(self, name: str) -> None:
        self.uncompiled = 0
        self._name = name
        self._order = _order_on("cpu")
        self._attention: Attention | None = None
        _by_name[name] = self

    @contextmanager
    def of_call(self, attention: Attention, device: torch.device) -> Iterator[None]:
        """Inside, `attention` computes, on tensors of `device`."""
        self._attention, self._order = attention, _order_on(device.type)
        try:
            yield
        finally:
            self._attention = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, s, H, D] of this rank's tokens in and out."""
        if not torch.compiler.is_compiling():
            self.uncompiled += 1
        return _attend(query, key, value, self._name, self._order)

    def compute(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same outside of what is compiled."""
        assert self._attention is not None, "blocks run inside of_call"
        return self._attention.attend(query, key, value)


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
    "parallel_backend::attend",
    mutates_args=("order",),
    schema="(Tensor query, Tensor key, Tensor value, str name, Tensor(a!) order) -> Tensor",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, name: str, order: Tensor) -> Tensor:
    operator = _by_name[name]
    assert isinstance(operator, AttentionOperator)
    return operator.compute(query, key, value).contiguous()  # as the description below promises


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, name: str, order: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op(
    "parallel_backend::add_up",
    mutates_args=("partial", "order"),
    schema="(Tensor(a!) partial, str name, Tensor(b!) order) -> ()",
)
def _add_up(partial: Tensor, name: str, order: Tensor) -> None:
    meeting = _by_name[name]
    assert isinstance(meeting, SliceMeeting)
    meeting.sum(partial)


@torch.library.custom_op(
    "parallel_backend::join",
    mutates_args=("order",),
    schema="(Tensor columns, int degree, str name, Tensor(a!) order) -> Tensor",
)
def _join(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    meeting = _by_name[name]
    assert isinstance(meeting, SliceMeeting)
    return meeting.joined(columns).contiguous()


@_join.register_fake
def _(columns: Tensor, degree: int, name: str, order: Tensor) -> Tensor:
    return columns.new_empty(columns.shape[0], columns.shape[1] * degree)
