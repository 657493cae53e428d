"""Functions around a library's own attention while a rank's model computes: ranks that meet, and a chosen kernel.

A model's provider has its library's attention ask standing_around() at each call; of blocks that are compiled an
operator does, into which torch never looks. Such an operator says that it changes `order`, a tensor that nobody reads:
so two in one block keep their order, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .base import AttentionCall

_attend: ContextVar[AttentionCall | None] = ContextVar("attend", default=None)
_kernel: ContextVar[AttentionCall | None] = ContextVar("kernel", default=None)
_orders: dict[str, Tensor] = {}  # by type of device


def attention_by(attend: AttentionCall) -> AbstractContextManager[None]:
    """Inside, `attend(original, q, k, v, heads, …)` answers each call of attention: ComfyUI's signature."""
    return inside(_attend, attend)


def attention_kernel(kernel: AttentionCall) -> AbstractContextManager[None]:
    """Inside, `kernel(original, q, k, v, heads, …)` stands in place of the library's own attention; what attention_by
    has comes before."""
    return inside(_kernel, kernel)


def standing_around(original: AttentionCall, *, replaceable: bool = True) -> AttentionCall:
    """Returns what answers a call of attention now: `original` itself where nothing else does. `replaceable`: a
    kernel may stand in for it."""
    attend, kernel = _attend.get(), _kernel.get() if replaceable else None
    call = original if kernel is None else partial(kernel, original)
    return call if attend is None else partial(attend, call)


def prepare_order(device_type: str) -> None:
    """Makes the order of such devices before blocks are compiled for one, since compiled code takes what is there."""
    with torch.inference_mode(False):
        _orders.setdefault(device_type, torch.zeros(1, device=device_type))


def order_of(tensor: Tensor) -> Tensor:
    """Returns the order of operators on the device of `tensor`."""
    return _orders[tensor.device.type]


@contextmanager
def inside(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside, the variable has this value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
