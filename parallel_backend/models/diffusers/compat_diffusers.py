"""The only place that patches diffusers (written for 0.42.1; checked by the parity tests).

Attention over the tokens of several ranks must replace the calls of `dispatch_attention_fn` in diffusers' processors.
diffusers' own context parallelism (`parallel_config`) can be set up once per model and has no CFG split. It needs
lengths that divide, except in variants that cannot combine Ulysses with Ring (docs/decisions/002). The processors look
the function up in their module at each call, so one replacement there serves them all and no processor is copied.
The rotary embedding is replaced in the same way while another function answers it (engine/attention/projections.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.transformers import transformer_flux
from torch import Tensor

from ..attention import AttentionCall, order_of, prepare_order, replaced
from ..base import Rotate

_original = transformer_flux.dispatch_attention_fn


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


@contextmanager
def rotary_by(rotate: Rotate) -> Iterator[None]:
    """Makes `rotate` compute each rotation of queries or keys while the context is open."""
    original = transformer_flux.apply_rotary_emb

    def routed(tokens: Tensor, freqs_cis: Any, sequence_dim: int = 2, **form: Any) -> Tensor:
        def apply(parts: list[Tensor], by: Any) -> list[Tensor]:
            return [original(part, by, sequence_dim=sequence_dim, **form) for part in parts]

        return rotate(apply, [tokens], freqs_cis, 3 - sequence_dim)[0]

    transformer_flux.apply_rotary_emb = routed
    try:
        yield
    finally:
        transformer_flux.apply_rotary_emb = original


def patch_diffusers(device_type: str) -> None:
    """Patches diffusers, so that a call can replace attention. `device_type`: of compiled blocks."""
    transformer_flux.dispatch_attention_fn = _routed
    prepare_order(device_type)
