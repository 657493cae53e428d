"""The only place that patches diffusers (written for 0.42.1; checked by the parity tests).

Attention over the tokens of several ranks must replace the calls of `dispatch_attention_fn` in diffusers' processors.
diffusers' own context parallelism (`parallel_config`) can be set up once per model and has no CFG split. It needs
lengths that divide, except in variants that cannot combine Ulysses with Ring (docs/decisions/002). The processors look
the function up in their module at each call, so one replacement there serves them all and no processor is copied.

The rotary embedding is replaced as well: diffusers' own cannot reshape a tensor without tokens, which a rank has if
there are fewer tokens than ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from diffusers.models.transformers import transformer_flux
from torch import Tensor

from ..attention import AttentionCall, inside, order_of, prepare_order, replaced
from ..base import Rotate

_rotate: ContextVar[Rotate | None] = ContextVar("rotate", default=None)
_original = transformer_flux.dispatch_attention_fn
_rotated = transformer_flux.apply_rotary_emb


def _routed_rotation(tokens: Tensor, freqs_cis: Any, sequence_dim: int = 2, **form: Any) -> Tensor:
    def apply(parts: list[Tensor], by: Any) -> list[Tensor]:
        return [_rotated(part, by, sequence_dim=sequence_dim, **form) for part in parts]

    if not tokens.numel():
        return tokens
    rotate = None if torch.compiler.is_compiling() else _rotate.get()
    if rotate is None:
        return apply([tokens], freqs_cis)[0]
    return rotate(apply, [tokens], freqs_cis, 3 - sequence_dim)[0]


def _routed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Replaces dispatch_attention_fn: [B, S, H, D] in and out."""
    if torch.compiler.is_compiling():
        return _attend_unseen(query, key, value, attn_mask, order_of(query))
    attend = replaced(_heads_first)
    if attend is None:
        return _original(query, key, value, attn_mask, *args, **kwargs)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    call = AttentionCall(q, k, v, query.shape[2], attn_mask, skip_reshape=True, skip_output_reshape=True)
    return attend(call).transpose(1, 2)


@torch.library.custom_op(
    "parallel_backend::diffusers_attention",
    mutates_args=("order",),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor(a!) order) -> Tensor",
)
def _attend_unseen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, order: Tensor) -> Tensor:
    """Computes attention as an operator that compiled blocks call. `order`: see models/attention.py."""
    return _routed(query, key, value, mask).contiguous()  # the fake below promises it


@_attend_unseen.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, order: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _heads_first(call: AttentionCall) -> Tensor:
    """Calls diffusers' attention for [B, H, S, D] in and out."""
    tokens_first = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
    return _original(*tokens_first, attn_mask=call.mask).transpose(1, 2)


def rotary_by(rotate: Rotate) -> AbstractContextManager[None]:
    """Makes `rotate` compute each rotation of queries or keys while the context is open."""
    return inside(_rotate, rotate)


def patch_diffusers(device_type: str) -> None:
    """Patches diffusers, so that a call can replace attention and rotations. `device_type`: of compiled blocks."""
    transformer_flux.dispatch_attention_fn = _routed
    transformer_flux.apply_rotary_emb = _routed_rotation
    prepare_order(device_type)
