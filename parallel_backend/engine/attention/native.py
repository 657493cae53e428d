"""The native engine's attention: Ulysses inside, Ring outside, exact for any token counts.

Ulysses: DeepSpeed-Ulysses (Jacobs et al. 2023), §3: one all-to-all trades tokens for heads, one trades them back. Where
exchanges run beside what is computed meanwhile, values go first and queries and keys together (docs/decisions/035).
Ring: Ring Attention (Liu et al. 2023): keys and values travel, partial results merge by log-sum-exp.
USP (Fang and Zhao 2024) is the product of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import slice_of
from ..comm.collectives import PendingExchange, all_to_all, begin_all_to_all, ring_shares
from ..comm.groups import Axis, Layout
from ..comm.traffic_counter import Traffic
from ..token_split import TokenPlan
from .kernels import TORCH, attend, attend_with_lse, merge
from .kv_cache import KVRecorder


@dataclass(frozen=True)
class NativeAttention:
    """The engine: attention over the tokens of all ranks of the sequence axis of `layout`. `wanted_kernel`: one that
    returns the log-sum-exp where `layout` has a ring."""

    layout: Layout
    wanted_kernel: str
    traffic: Traffic
    overlaps: bool = False  # whether exchanges run beside what is computed meanwhile

    name = "native"
    takes_masks = True

    def prepare(self) -> None:
        """Its groups belong to the layout: nothing to do."""

    def refusal(self, plan: TokenPlan) -> str | None:
        """Why this engine cannot compute `plan` exactly, or None."""
        return None

    def of_call(
        self, plan: TokenPlan, mask: Tensor | None = None, recorder: KVRecorder | None = None
    ) -> NativeCall:
        """The attention of one model call. `recorder`: of PipeFusion, for one chunk of it."""
        kernel = TORCH if mask is not None else self.wanted_kernel  # the others take no masks
        sends_early = self.overlaps and self.layout.ulysses.size > 1
        layout = self.layout
        return NativeCall(
            layout.ulysses, layout.ring, kernel, self.traffic, plan, mask, recorder, sends_early=sends_early
        )


@dataclass(frozen=True, eq=False)
class NativeCall:
    """Attention of one model call (base.Attention).

    `mask`: what is added to the scores, [B, 1, S, S] over the tokens of all ranks, rank by rank; None for nothing.
    """

    _ulysses: Axis
    _ring: Axis
    kernel: str
    _traffic: Traffic
    plan: TokenPlan
    mask: Tensor | None
    recorder: KVRecorder | None
    sends_early: bool = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """This rank's queries over everybody's keys: [B, s, H, D] of this rank's tokens in and out."""
        if self._ulysses.size == 1:
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            return self._over_ring(query, key, value).transpose(1, 2)
        return self._of_heads(self._tokens_to_heads(query, key, value, runs_beside=False))

    def send(self, *tensors: Tensor) -> PendingExchange:
        """Begins to send tokens to the ranks that attend to them, or with them."""
        return self._tokens_to_heads(*tensors, runs_beside=True)

    def attend_sent(self, values: PendingExchange, queries_and_keys: PendingExchange) -> Tensor:
        """`attend` of what was sent: the values, then queries and keys."""
        return self._of_heads(queries_and_keys, values)

    def _of_heads(self, *exchanges: PendingExchange) -> Tensor:
        """Attention of this rank's heads; queries, keys and values come one after the other."""
        query, key, value = (
            tensor.permute(1, 2, 0, 3) for exchange in exchanges for tensor in exchange.taken().unbind(1)
        )
        return self._heads_to_tokens(self._over_ring(query, key, value))

    def _group_lengths(self) -> tuple[int, ...]:
        """Tokens of each rank of this rank's Ulysses group."""
        first = self._ring.index * self._ulysses.size
        return self.plan.lengths[first : first + self._ulysses.size]

    def _tokens_to_heads(self, *tensors: Tensor, runs_beside: bool) -> PendingExchange:
        """n x [B, s, H, D] -> [S, n, B, H/P, D]: all tokens of the group, this rank's heads, in one exchange.

        Tokens come first on the wire, so what arrives is one contiguous tensor and needs no copy.
        """
        ranks = self._ulysses.size
        batch, tokens, heads, channels = tensors[0].shape
        send = tensors[0].new_empty(ranks, tokens, len(tensors), batch, heads // ranks, channels)
        for n, tensor in enumerate(tensors):
            send[:, :, n] = tensor.unflatten(2, (ranks, heads // ranks)).permute(2, 1, 0, 3, 4)
        return begin_all_to_all(
            send.flatten(0, 1),
            (tokens,) * ranks,
            self._group_lengths(),
            self._ulysses,
            self._traffic,
            runs_beside=runs_beside,
        )

    def _heads_to_tokens(self, out: Tensor) -> Tensor:
        """[B, H/P, S, D] -> [B, s, H, D]: this rank's tokens, all heads."""
        ranks, lengths = self._ulysses.size, self._group_lengths()
        mine = lengths[self._ulysses.index]
        send = out.permute(2, 0, 1, 3).contiguous()
        received = all_to_all(send, lengths, (mine,) * ranks, self._ulysses, self._traffic)
        batch, heads, channels = received.shape[1:]
        received = received.view(ranks, mine, batch, heads, channels)
        return received.permute(2, 1, 0, 3, 4).reshape(batch, mine, ranks * heads, channels)

    def _over_ring(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, H, s, D] of this ring member's tokens over the keys and values of all members."""
        width = self._ulysses.size
        sizes = tuple(sum(self.plan.lengths[r * width : (r + 1) * width]) for r in range(self._ring.size))
        if self.recorder is not None:
            key, value = self.recorder.recall(key, value)
            sizes = self.recorder.lengths or sizes
        if self._ring.size == 1:
            return attend(query, key, value, self.mask, self.kernel)
        shares = ring_shares(_pair(key, value), sizes, self._ring, self._traffic)
        return merge(self._partial_results(query, shares, sizes), query.dtype)

    def _partial_results(
        self, query: Tensor, shares: Iterator[Tensor], sizes: tuple[int, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        index = self._ring.index
        for hop, share in enumerate(shares):
            if not len(share):
                continue  # a rank without tokens adds nothing, and the kernels have no answer for no keys
            key, value = (share[:, n].permute(1, 2, 0, 3) for n in range(2))
            mask = self.mask
            if mask is not None:
                mask = mask[:, :, slice_of(sizes, index), slice_of(sizes, (index - hop) % len(sizes))]
            yield attend_with_lse(query, key, value, mask, self.kernel)


def _pair(key: Tensor, value: Tensor) -> Tensor:
    """2 x [B, H, s, D] -> [s, 2, B, H, D]: keys and values in one message."""
    return torch.stack([key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)], dim=1)
