"""Functions that answer a library's attention calls while a rank's model computes: sequence parallelism, other kernels.

Each provider makes its library's attention call standing_around(). In compiled blocks a custom operator does so, which
torch does not trace. That operator claims to write to `order`, a tensor that nothing reads: this keeps torch from
reordering two such operators in a block, since all ranks must run their collectives in the same order.
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
_orders: dict[str, Tensor] = {}  # by device type


def attention_by(attend: AttentionCall) -> AbstractContextManager[None]:
    """Makes `attend(original, q, k, v, heads, …)` (ComfyUI's signature) answer attention calls in the `with` block."""
    return inside(_attend, attend)


def attention_kernel(kernel: AttentionCall) -> AbstractContextManager[None]:
    """Makes `kernel(original, q, k, v, heads, …)` replace the library's own attention in the `with` block. A function
    set by attention_by() is called first and gets the kernel as its `original`."""
    return inside(_kernel, kernel)


def standing_around(original: AttentionCall, *, replaceable: bool = True) -> AttentionCall:
    """Returns the function that answers attention calls now, or `original` if none is set. `replaceable`: True if a
    kernel set by attention_kernel() may replace `original`."""
    attend, kernel = _attend.get(), _kernel.get() if replaceable else None
    call = original if kernel is None else partial(kernel, original)
    return call if attend is None else partial(attend, call)


def prepare_order(device_type: str) -> None:
    """Makes the `order` tensor of a device type. Call it before compiling blocks: compiled code keeps that tensor."""
    with torch.inference_mode(False):
        _orders.setdefault(device_type, torch.zeros(1, device=device_type))


def order_of(tensor: Tensor) -> Tensor:
    """Returns the `order` tensor (see the module's docstring) for the device of `tensor`."""
    return _orders[tensor.device.type]


@contextmanager
def inside(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets the variable to `value` in the `with` block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)
