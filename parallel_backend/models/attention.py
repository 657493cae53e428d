"""Functions that answer a library's attention calls while a rank's model computes: sequence parallelism, other kernels.

Each provider passes its library's attention calls to replaced(). In compiled blocks a custom operator does so, which
torch does not trace. That operator claims to write to `order`, a tensor that nothing reads: this keeps torch from
reordering two such operators in a block, since all ranks must run their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, with the arguments of ComfyUI's functions.

    `q`, `k`, `v`: [B, S, H D], or [B, H, S, D] with `skip_reshape`. k and v may have fewer heads, if several heads of q
    share them. The output is [B, S, H D], or [B, H, S, D] with `skip_output_reshape`. `options`: further arguments,
    which reach the library's function unchanged.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    heads: int
    mask: Tensor | None = None
    attn_precision: torch.dtype | None = None
    skip_reshape: bool = False
    skip_output_reshape: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> AttentionCall:
        """Returns the call with the arguments of one of ComfyUI's functions."""
        named: dict[str, Any] = {name: kwargs.pop(name) for name in _NAMED & kwargs.keys()}
        named["options"] = kwargs
        return cls(*args, **named)

    def by(self, function: Callable[..., Tensor]) -> Tensor:
        """Calls a function with the signature of ComfyUI's."""
        return function(
            self.q,
            self.k,
            self.v,
            self.heads,
            mask=self.mask,
            attn_precision=self.attn_precision,
            skip_reshape=self.skip_reshape,
            skip_output_reshape=self.skip_output_reshape,
            **self.options,
        )

    @property
    def token_dim(self) -> int:
        """The dim of q, k and v that has the tokens."""
        return 2 if self.skip_reshape else 1

    def by_heads(self) -> AttentionCall:
        """Returns the same call with tensors [B, H, S, D] in and out."""
        if self.skip_reshape:
            return replace(self, skip_output_reshape=True)
        channels = self.q.shape[-1] // self.heads
        q, k, v = (t.reshape(*t.shape[:2], -1, channels).transpose(1, 2) for t in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, skip_reshape=True, skip_output_reshape=True)

    def on(self, q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> AttentionCall:
        """Returns the same call by heads of other tensors [B, H, S, D], with `changes` of other fields."""
        return replace(self, q=q, k=k, v=v, heads=q.shape[1], **changes)

    def shaped(self, out: Tensor) -> Tensor:
        """Returns the output [B, H, S, D] of `by_heads` in the form that the call asks for."""
        return out if self.skip_output_reshape else out.transpose(1, 2).flatten(2)


_NAMED = {one.name for one in fields(AttentionCall)} - {"options"}

# A library's attention, and a function that answers its calls: it gets that attention and the call.
Attend = Callable[[AttentionCall], Tensor]
Replacement = Callable[[Attend, AttentionCall], Tensor]

_attend: ContextVar[Replacement | None] = ContextVar("attend", default=None)
_kernel: ContextVar[Replacement | None] = ContextVar("kernel", default=None)
_orders: dict[str, Tensor] = {}  # by device type


def attention_by(attend: Replacement) -> AbstractContextManager[None]:
    """Makes `attend` answer attention calls in the `with` block."""
    return inside(_attend, attend)


def attention_kernel(kernel: Replacement) -> AbstractContextManager[None]:
    """Makes `kernel` replace the library's own attention in the `with` block. A function set by attention_by() is
    called first and gets the kernel as its library's attention."""
    return inside(_kernel, kernel)


def replaced(library: Attend, *, replaceable: bool = True) -> Attend | None:
    """Returns what answers attention calls now in place of `library`, or None if nothing does. `replaceable`: True if a
    kernel set by attention_kernel() may replace it."""
    attend, kernel = _attend.get(), _kernel.get() if replaceable else None
    if kernel is not None:
        library = partial(kernel, library)
    if attend is not None:
        return partial(attend, library)
    return None if kernel is None else library


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
