"""Flux's attention in the order in which ranks can send its parts: values, then keys and queries, then the rest.

diffusers' processor makes all of them before it asks for attention, and a single block's feed-forward layer is computed
before that, though attention does not need it. Here what is made is on its way while the next projection is computed,
and in single blocks that layer. Every operation is diffusers' own, on the same tensors: results are equal to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from diffusers.models.transformers import transformer_flux
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
)
from torch import Tensor, nn

from ..base import EarlyAttention, OnTheWay


class _Sent(NamedTuple):
    values: OnTheWay
    queries_and_keys: OnTheWay


class SendingProcessor(FluxAttnProcessor):
    """diffusers' processor of one attention, which sends early where the attention of a call can (base.EarlyAttention).

    In compiled blocks nothing is sent early: one operator stands for attention there (engine/comm/operators.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self._sent: _Sent | None = None

    def send(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        attention: EarlyAttention,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        """Makes what attention needs of tokens [B, n, width], and of the text's [B, t, width] before them."""
        text = encoder_hidden_states
        value = _heads(attn, attn.to_v, hidden_states)
        if text is not None:
            value = torch.cat([_heads(attn, attn.add_v_proj, text), value], dim=1)
        values = attention.send(value)
        key = attn.norm_k(_heads(attn, attn.to_k, hidden_states))
        query = attn.norm_q(_heads(attn, attn.to_q, hidden_states))
        if text is not None:
            key = torch.cat([attn.norm_added_k(_heads(attn, attn.add_k_proj, text)), key], dim=1)
            query = torch.cat([attn.norm_added_q(_heads(attn, attn.add_q_proj, text)), query], dim=1)
        query, key = (
            transformer_flux.apply_rotary_emb(tensor, rotary, sequence_dim=1) for tensor in (query, key)
        )
        self._sent = _Sent(values, attention.send(query, key))

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        if not _sends_early(attention_mask):
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        if self._sent is None:
            self.send(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        sent, self._sent = self._sent, None
        assert sent is not None, "sent above or before"
        out = attention_mask.attend_sent(*sent).flatten(2, 3)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image.contiguous())), attn.to_add_out(text.contiguous())

    def forget(self) -> None:
        """Lets go of what a call that failed has sent."""
        self._sent = None


class _SingleBlock:
    """The hooks of a single block: before its feed-forward layer computes, attention's parts are sent."""

    def __init__(self, block: FluxSingleTransformerBlock, processor: SendingProcessor) -> None:
        self._attn = block.attn
        self._processor = processor
        self._call: dict[str, Any] = {}
        block.register_forward_pre_hook(self._begin, with_kwargs=True)
        block.proj_mlp.register_forward_pre_hook(self._before_mlp)
        block.register_forward_hook(self._end, always_call=True)

    def _begin(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._call = kwargs

    def _before_mlp(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        attention = (self._call.get("joint_attention_kwargs") or {}).get("attention_mask")
        if _sends_early(attention):
            self._processor.send(self._attn, args[0], None, attention, self._call["image_rotary_emb"])

    def _end(self, block: nn.Module, *inputs_and_output: Any) -> None:
        self._call = {}
        self._processor.forget()


def send_early(transformer: FluxTransformer2DModel) -> None:
    """Has the attentions of a transformer send early."""
    for module in transformer.modules():
        if isinstance(module, FluxAttention):
            module.set_processor(SendingProcessor())
    for block in transformer.single_transformer_blocks:
        _SingleBlock(block, block.attn.processor)


def _sends_early(attention: Any) -> TypeGuard[EarlyAttention]:
    return bool(getattr(attention, "sends_early", False))


def _heads(attn: FluxAttention, projection: nn.Module, tokens: Tensor) -> Tensor:
    """[B, n, width] -> [B, n, heads, head_dim]"""
    heads: Tensor = projection(tokens).unflatten(-1, (-1, attn.head_dim))
    return heads
