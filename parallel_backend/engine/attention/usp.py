"""xfuser's attention for any module's blocks, where it computes exactly what a call asks for; native does the rest."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ...models.tokens.regions import Attends
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from ..tokens.block_tokens import BlockTokens
from .guides import Guides
from .kernel_choice import kernel_for
from .sequence import Asked, Attend, StaleKeys, UnevenAttention

# Tokens that one rank may have more than another: all ranks compute those, each keeps its own.
_MAX_SURPLUS = 4
# Arguments of ComfyUI's attention that change nothing here.
_HARMLESS = {"attn_precision", "transformer_options", "low_precision_attention"}


def why_not_xfuser(layout: Layout) -> str:
    """Why xfuser computes nothing under this layout, in a user's words; empty where it does."""
    if layout.tensor.size > 1:
        return "its tensor parallelism splits the feed-forward layers only"
    if layout.pipe.size > 1:
        return "its PipeFusion belongs to its own pipelines"
    if layout.sequence.size == 1:
        return f"{layout.strategy.describe()} splits no tokens, which is all that it would compute"
    if find_spec("xfuser") is None:
        return "the package xfuser is not installed"
    return ""


class XfuserEngine:
    """xfuser's groups for one layout, and how blocks attend by them. `add_note`: is told, once for each reason, what
    native computes in its place. Collective: all ranks make it together."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, traffic: Traffic, add_note: Callable[[str], None]
    ) -> None:
        from .xfuser import XfuserAttention  # takes seconds to import, so only where it is asked for

        kernel = kernel_for(layout.world.device, dtype, ring=layout.ring.size > 1).name
        self._usp = XfuserAttention(layout, kernel, traffic)
        self._add_note = add_note
        self.attended = False  # True if xfuser has computed some attention since `prepare`

    def prepare(self) -> None:
        """Before each call of the module, on every rank."""
        self._usp.prepare()
        self.attended = False

    def attention(
        self,
        layout: Layout,
        tokens: BlockTokens,
        attends: tuple[Attends, ...],
        block: nn.Module | None = None,
        guides: Guides | None = None,
        stale_keys: StaleKeys | None = None,
    ) -> UnevenAttention:
        """The attention of one call of a block, in place of UnevenAttention."""
        assert stale_keys is None, "PipeFusion's stages attend by native"
        return _UspAttention(self, layout, tokens, attends, block, guides)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """[B, H, s, D] of this rank's tokens in and out. `lengths`: tokens of each rank."""
        self.attended = True
        tokens_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return self._usp.of_lengths(lengths).attend(*tokens_first).transpose(1, 2)

    def leave_to_native(self, reason: str) -> None:
        self._add_note(f"engine xfuser fell back to native: {reason}")


class _UspAttention(UnevenAttention):
    """Attention by xfuser where it is exact."""

    def __init__(self, engine: XfuserEngine, *of_call: Any) -> None:
        super().__init__(*of_call)
        self._engine = engine

    def _attend(self, original: Attend, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        lengths = self._tokens.lengths(asked.keys)
        reason = "" if asked.queries == asked.keys else "it knows attention of tokens to themselves only"
        reason = reason or self._refusal(q, k, asked, lengths)
        if reason:
            self._engine.leave_to_native(reason)
            return super()._attend(original, q, k, v, asked)
        return self._engine.attend(q, k, v, lengths)

    def _refusal(self, q: Tensor, k: Tensor, asked: Asked, lengths: tuple[int, ...]) -> str:
        """Why this call is native's, in a user's words, alike on all ranks; empty where it is xfuser's."""
        if asked.mask is not None or asked.guides is not None:
            return "it computes no attention masks"
        if k.shape[1] != q.shape[1] or q.shape[1] % self._ulysses.size:
            return f"its Ulysses needs heads that divide, and here are {q.shape[1]} heads with {k.shape[1]} of keys"
        unknown = sorted(name for name, value in asked.others.items() if value and name not in _HARMLESS)
        if unknown:
            return f"it takes no {', '.join(unknown)}"
        if not min(lengths):
            return (
                f"it needs a token for each process, and {len(lengths)} processes share {sum(lengths)} tokens"
            )
        if max(lengths) - min(lengths) > _MAX_SURPLUS:
            return "it needs equal shares, and device_shares asks for others"
        return ""
