"""Attention of ComfyUI's models as a custom operator of torch, which compiled blocks call and torch does not trace.

The operator calls whatever answers ComfyUI's attention at that moment (attention_router.py): ComfyUI's own function, or
one in which ranks communicate. For `order`, see models/attention.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..attention import order_of

# The arguments that ComfyUI's models pass to attention after q, k, v and heads: name, type in the operator's schema,
# default.
_ARGUMENTS: tuple[tuple[str, str, Any], ...] = (
    ("mask", "Tensor?", None),
    ("attn_precision", "ScalarType?", None),
    ("skip_reshape", "bool", False),
    ("skip_output_reshape", "bool", False),
    ("scale", "float?", None),
    ("enable_gqa", "bool", False),
    ("low_precision_attention", "bool", True),
)
_NAMES = tuple(name for name, _, _ in _ARGUMENTS)


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    *args: Any,
    transformer_options: object = None,
    preferred_attention: Any = None,
    _inside_attn_wrapper: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Returns what ComfyUI's attention function `name` gives. Raises TypeError for an argument that is none of
    _ARGUMENTS: such a call cannot be compiled. `transformer_options` is ignored: blocks are not compiled if it
    overrides attention (ModuleCall.eager), and inside an override ComfyUI's own function is meant.
    `preferred_attention`: since ComfyUI 0.38, a module that holds the attention function which the file asks for, and
    its name."""
    has_preferred = preferred_attention is not None and preferred_attention.function is not None
    preferred = preferred_attention.config["attention"] if has_preferred else ""
    given = dict(zip(_NAMES[: len(args)], args, strict=True)) | kwargs
    values = [given.pop(name, default) for name, _, default in _ARGUMENTS]
    if given:
        raise TypeError(f"attention with {', '.join(given)} cannot be compiled")
    return _attend(q, k, v, heads, name, preferred, order_of(q), *values)


@torch.library.custom_op(
    "parallel_backend::comfyui_attention",
    mutates_args=("order",),
    schema="(Tensor q, Tensor k, Tensor v, SymInt heads, str name, str preferred, Tensor(a!) order, "
    f"{', '.join(f'{kind} {name}' for name, kind, _ in _ARGUMENTS)}) -> Tensor",
)
def _attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, name: str, preferred: str, order: Tensor, *values: Any
) -> Tensor:
    from comfy.ldm.modules import attention

    # No defaults: ComfyUI's functions check which arguments are there.
    options = {
        argument: value
        for (argument, _, default), value in zip(_ARGUMENTS, values, strict=True)
        if value is not default
    }
    if preferred:
        function = attention.get_attention_function(preferred)
        options["preferred_attention"] = SimpleNamespace(function=function)
    out = getattr(attention, name)(q, k, v, heads, **options)
    out = out.contiguous()  # the fake implementation below describes contiguous outputs
    # An operator may not return one of its inputs.
    return out.clone() if any(out.data_ptr() == given.data_ptr() for given in (q, k, v)) else out


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, heads: int, name: str, preferred: str, order: Tensor, *values: Any
) -> Tensor:
    given = dict(zip(_NAMES, values, strict=True))
    by_heads = given["skip_reshape"]
    batch, tokens = q.shape[0], q.shape[2] if by_heads else q.shape[1]
    if by_heads or v.ndim == 4:  # SD3's keys and values are split into heads already
        channels = v.shape[3]
    else:  # several heads may share keys
        channels = v.shape[2] // (k.shape[2] // (q.shape[2] // heads))
    if given["skip_output_reshape"]:
        return q.new_empty(batch, heads, tokens, channels)
    return q.new_empty(batch, tokens, heads * channels)
