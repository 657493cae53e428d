"""The one place that changes diffusers (written for 0.42.1; checked by the parity tests).

Reason: attention over the tokens of several ranks must stand where diffusers' processors call `dispatch_attention_fn`.
What diffusers has for that, context parallelism behind `parallel_config`, works once per model, needs lengths that
divide or cannot combine Ulysses with Ring, and has no CFG split (docs/decisions/002). The name is looked up in the
processors' module at each call, so a router put there serves every processor without copying one.

Its forward hands `attention_mask` on to each dispatch as it is, so the attention of a call travels there: an argument
of that call, with nothing to set before it and nothing left behind.

Also, its rotary embedding cannot reshape a tensor without tokens, which is what a rank has where there are fewer tokens
than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from diffusers.models.transformers import transformer_flux
from torch import Tensor

from ..base import Attention, AttentionCall

_attend: ContextVar[AttentionCall | None] = ContextVar("attend", default=None)
_original = transformer_flux.dispatch_attention_fn
_rotated = transformer_flux.apply_rotary_emb


def _rotated_where_any(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _rotated(tokens, *args, **kwargs) if tokens.numel() else tokens


def _routed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if hasattr(attn_mask, "attend"):
        return attn_mask.attend(query, key, value)
    if (attend := _attend.get()) is not None:
        heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
        form = {"skip_reshape": True, "skip_output_reshape": True}
        return attend(_heads_first, *heads_first, query.shape[2], mask=attn_mask, **form).transpose(1, 2)
    return _original(query, key, value, attn_mask, *args, **kwargs)


def _heads_first(
    query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None, **form: Any
) -> Tensor:
    """diffusers' attention with ComfyUI's signature: [B, H, S, D] in and out."""
    tokens_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return _original(*tokens_first, attn_mask=mask).transpose(1, 2)


@contextmanager
def attention_by(attend: AttentionCall) -> Iterator[None]:
    """Inside, `attend(original, q, k, v, heads, mask=…, …)` answers each call of attention: ComfyUI's
    signature, [B, H, S, D] in and out."""
    before = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(before)


def patch_diffusers() -> None:
    """Has attention be computed by what a call was given for it; calls that were given nothing are not affected."""
    transformer_flux.dispatch_attention_fn = _routed
    transformer_flux.apply_rotary_emb = _rotated_where_any


def attention_arguments(attention: Attention | None) -> dict[str, object]:
    """`attention` as diffusers' joint_attention_kwargs."""
    return {} if attention is None else {"attention_mask": attention}
