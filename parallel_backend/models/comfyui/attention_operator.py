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


def attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    low_precision_attention: bool = True,
    transformer_options: object = None,
    preferred_attention: Any = None,
    _inside_attn_wrapper: bool = False,
) -> Tensor:
    """Returns what ComfyUI's attention function `name` gives. The arguments are all that ComfyUI's models pass to it; a
    call with another one cannot be compiled. `transformer_options` is ignored: blocks are not compiled if it overrides
    attention (ModuleCall.eager), and inside an override ComfyUI's own function is meant. `preferred_attention`: since
    ComfyUI 0.38, a module that holds the attention function which the file asks for, and its name."""
    has_preferred = preferred_attention is not None and preferred_attention.function is not None
    preferred = preferred_attention.config["attention"] if has_preferred else ""
    return _attend(
        q,
        k,
        v,
        heads,
        mask,
        attn_precision,
        skip_reshape,
        skip_output_reshape,
        scale,
        enable_gqa,
        low_precision_attention,
        name,
        preferred,
        order_of(q),
    )


@torch.library.custom_op(
    "parallel_backend::comfyui_attention",
    mutates_args=("order",),
    schema="(Tensor q, Tensor k, Tensor v, SymInt heads, Tensor? mask, ScalarType? attn_precision, bool skip_reshape, "
    "bool skip_output_reshape, float? scale, bool enable_gqa, bool low_precision_attention, str name, str preferred, "
    "Tensor(a!) order) -> Tensor",
)
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    scale: float | None,
    enable_gqa: bool,
    low_precision_attention: bool,
    name: str,
    preferred: str,
    order: Tensor,
) -> Tensor:
    from comfy.ldm.modules import attention

    others: dict[str, object] = {}  # no defaults: ComfyUI's functions check which are there
    if scale is not None:
        others["scale"] = scale
    if enable_gqa:
        others["enable_gqa"] = True
    if not low_precision_attention:
        others["low_precision_attention"] = False
    if preferred:
        function = attention.get_attention_function(preferred)
        others["preferred_attention"] = SimpleNamespace(function=function)
    out = getattr(attention, name)(
        q,
        k,
        v,
        heads,
        mask=mask,
        attn_precision=attn_precision,
        skip_reshape=skip_reshape,
        skip_output_reshape=skip_output_reshape,
        **others,
    )
    out = out.contiguous()  # the fake implementation below describes contiguous outputs
    # An operator may not return one of its inputs.
    return out.clone() if any(out.data_ptr() == given.data_ptr() for given in (q, k, v)) else out


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    mask: Tensor | None,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    *others: Any,
) -> Tensor:
    batch, tokens = q.shape[0], q.shape[2] if skip_reshape else q.shape[1]
    if skip_reshape or v.ndim == 4:  # SD3's keys and values are split into heads already
        channels = v.shape[3]
    else:  # several heads may share keys
        channels = v.shape[2] // (k.shape[2] // (q.shape[2] // heads))
    if skip_output_reshape:
        return q.new_empty(batch, heads, tokens, channels)
    return q.new_empty(batch, tokens, heads * channels)
