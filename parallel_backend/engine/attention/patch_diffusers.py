"""The one place that changes diffusers (written for 0.42.1; checked by the parity tests).

Reason: diffusers' attention processors call `dispatch_attention_fn(…, parallel_config=self._parallel_config)`, and only
diffusers' own context parallelism can stand behind `parallel_config`. That one works once per model, needs lengths
that divide or cannot combine Ulysses with Ring, and has no CFG split (docs/decisions/002). The name is looked up in the
processors' module at each call, so a router put there serves every processor without copying one.
"""

from __future__ import annotations

from typing import Protocol

from diffusers.models.transformers import transformer_flux
from torch import Tensor, nn


class SharedAttention(Protocol):
    """What may stand behind a processor's `_parallel_config`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """[B, s, H, D] of this rank's tokens in and out."""


_original = transformer_flux.dispatch_attention_fn


def _routed(query, key, value, attn_mask=None, *args, parallel_config=None, **kwargs):
    if hasattr(parallel_config, "attend"):
        return parallel_config.attend(query, key, value, attn_mask)
    return _original(query, key, value, attn_mask, *args, parallel_config=parallel_config, **kwargs)


def share_attention(transformer: nn.Module, attention: SharedAttention) -> None:
    """Has every attention of `transformer` computed by `attention`; other models are not affected."""
    transformer_flux.dispatch_attention_fn = _routed
    for module in transformer.modules():
        if (processor := getattr(module, "processor", None)) is not None:
            processor._parallel_config = attention
