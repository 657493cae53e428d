"""Attention of ComfyUI's models in a rank: what they call as optimized attention, another function may answer.

A model module takes the names `optimized_attention` and `optimized_attention_masked` from ComfyUI's attention module as
it is imported, so the router has to lie there before. ComfyUI's own hook, an override in `transformer_options`, reaches
only the models that pass those options on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..attention import prepare_order, standing_around
from . import attention_operator

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("optimized_attention", "optimized_attention_masked")
_CONTAINER = "AttentionTensorContainer"  # since ComfyUI 0.33


def install_router(device: torch.device) -> None:
    """Has both names lead through the router. Before a model module is imported, and once. `device`: of the models."""
    from comfy.ldm.modules import attention

    prepare_order(device.type)
    container = getattr(attention, _CONTAINER, ())
    for name in _NAMES:
        setattr(attention, name, _routed(name, getattr(attention, name), container))


def _routed(
    name: str, stock: Callable[..., Tensor], container: type[Any] | tuple[()], *, replaceable: bool = True
) -> Callable[..., Tensor]:
    """`container`: the class in which models may hand attention its tensors; () where there is none. `replaceable`:
    `stock` is ComfyUI's."""

    @functools.wraps(stock)
    def routed(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return attention_operator.attend(name, *_opened(args, container), **kwargs)
        call = standing_around(stock, replaceable=replaceable)
        return call(*(args if call is stock else _opened(args, container)), **kwargs)

    return routed


def _opened(args: tuple[Any, ...], container: type[Any] | tuple[()]) -> tuple[Any, ...]:
    """Takes tensors out of their containers, which gives up the caller's hold on them."""
    return tuple(arg.take() if isinstance(arg, container) else arg for arg in args)


def is_attention(name: str) -> bool:
    """True for the names that lead through the router."""
    return name in _NAMES


def reroute(name: str, replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Another pack's function in place of ComfyUI's attention, which leads through the router too."""
    from comfy.ldm.modules import attention

    return _routed(name, replacement, getattr(attention, _CONTAINER, ()), replaceable=False)


def routed_functions() -> dict[int, Callable[..., Tensor]]:
    """By the id of ComfyUI's attention as packs took it before it was routed: the function that leads through."""
    from comfy.ldm.modules import attention

    functions = [getattr(attention, name) for name in _NAMES]
    return {id(routed.__wrapped__): routed for routed in functions if hasattr(routed, "__wrapped__")}
