"""Routes the attention of ComfyUI's models in a rank, so that another function can answer `optimized_attention`.

Model modules import `optimized_attention` and `optimized_attention_masked` by name from ComfyUI's attention module, so
the router must be installed before them. ComfyUI's own hook, an override in `transformer_options`, reaches only models
that pass those options on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from ..attention import AttentionCall, prepare_order, replaced
from . import attention_operator

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = ("optimized_attention", "optimized_attention_masked")
_CONTAINER = "AttentionTensorContainer"  # since ComfyUI 0.33
_ROUTED = "_parallel_routed"  # attribute of a routed function: the one that it wraps


def install_router(device: torch.device) -> None:
    """Routes both names. Call it once, before any model module is imported. `device`: where the models compute."""
    from comfy.ldm.modules import attention

    prepare_order(device.type)
    for name in _NAMES:
        setattr(attention, name, _routed(name, getattr(attention, name)))


def is_replaced() -> bool:
    """Returns True while a function that is not routed stands in the place of ComfyUI's attention."""
    from comfy.ldm.modules import attention

    functions = [getattr(attention, name) for name in _NAMES]
    return any(getattr(one, _ROUTED, None) is not getattr(one, "__wrapped__", one) for one in functions)


def _routed(name: str, stock: Callable[..., Tensor], *, replaceable: bool = True) -> Callable[..., Tensor]:
    """Wraps `stock` in the router. `replaceable`: True if `stock` is ComfyUI's, which a chosen kernel may replace."""
    from comfy.ldm.modules import attention

    library = methodcaller("by", stock)
    container = getattr(attention, _CONTAINER, ())  # the class in which models may pass tensors to attention

    @functools.wraps(stock)
    def routed(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return attention_operator.attend(name, *_opened(args, container), **kwargs)
        attend = replaced(library, replaceable=replaceable)
        if attend is None:
            return stock(*args, **kwargs)
        return attend(AttentionCall.of(*_opened(args, container), **kwargs))

    setattr(routed, _ROUTED, stock)
    return routed


def _opened(args: tuple[Any, ...], container: type[Any] | tuple[()]) -> tuple[Any, ...]:
    """Takes tensors out of their containers, which frees the caller's reference to them."""
    return tuple(arg.take() if isinstance(arg, container) else arg for arg in args)


def is_attention(name: str) -> bool:
    """Returns True for the names that are routed."""
    return name in _NAMES


def reroute(name: str, replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Routes the function by which another pack replaced ComfyUI's attention `name`."""
    return _routed(name, replacement, replaceable=False)


def unrouted(function: Any) -> Any:
    """Returns the function that a routed one stands for; any other one unchanged."""
    return getattr(function, _ROUTED, function)


def routed_functions() -> dict[int, Callable[..., Tensor]]:
    """Maps the id of each stock function, which packs may have imported before, to its routed version."""
    from comfy.ldm.modules import attention

    functions = [getattr(attention, name) for name in _NAMES]
    return {id(routed.__wrapped__): routed for routed in functions if hasattr(routed, "__wrapped__")}
