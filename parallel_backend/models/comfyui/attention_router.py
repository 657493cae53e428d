"""Attention of ComfyUI's models in a rank: what they call as optimized attention, another function may answer.

A model module takes the names `optimized_attention` and `optimized_attention_masked` from ComfyUI's attention module as
it is imported, so the router has to lie there before. ComfyUI's own hook, an override in `transformer_options`, reaches
only the models that pass those options on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from . import attention_operator

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import AttentionCall

_NAMES = ("optimized_attention", "optimized_attention_masked")
_attend: ContextVar[AttentionCall | None] = ContextVar("attend", default=None)


def install_router(device: torch.device) -> None:
    """Has both names lead through the router. Before a model module is imported, and once. `device`: of the models."""
    from comfy.ldm.modules import attention

    attention_operator.prepare(device.type)
    for name in _NAMES:
        setattr(attention, name, _routed(name, getattr(attention, name)))


@contextmanager
def attention_by(attend: AttentionCall) -> Iterator[None]:
    """Inside, `attend(original, q, k, v, heads, …)` answers each call of optimized attention."""
    before = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(before)


def _routed(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return attention_operator.attend(name, *args, **kwargs)
        attend = _attend.get()
        return original(*args, **kwargs) if attend is None else attend(original, *args, **kwargs)

    return routed
