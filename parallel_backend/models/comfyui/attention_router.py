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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import AttentionCall

_NAMES = ("optimized_attention", "optimized_attention_masked")
_attend: ContextVar[AttentionCall | None] = ContextVar("attend", default=None)


def install_router() -> None:
    """Has both names lead through the router. Before a model module is imported, and once."""
    from comfy.ldm.modules import attention

    for name in _NAMES:
        setattr(attention, name, _routed(getattr(attention, name)))


@contextmanager
def attention_by(attend: AttentionCall) -> Iterator[None]:
    """Inside, `attend(original, q, k, v, heads, …)` answers each call of optimized attention."""
    before = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(before)


def _routed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def routed(*args: object, **kwargs: object) -> Tensor:
        attend = _attend.get()
        return original(*args, **kwargs) if attend is None else attend(original, *args, **kwargs)

    return routed
