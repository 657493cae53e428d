"""ComfyUI's attention over the tokens of all ranks: Ulysses with any number of heads and tokens, inside a Ring.

A Ulysses group (Jacobs et al. 2023) calls the attention function that ComfyUI chose. Heads and tokens need not divide,
and keys that several heads share are sent once. A ring (Liu et al. 2023) merges partial results by log-sum-exp, from
the fastest kernel that returns it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...layout import slice_of, split_sizes
from ...models.attention import Attend, AttentionCall
from ...models.tokens.regions import Attends, Guided, Window
from ...options import ROUNDED, SAME
from ..comm.collectives import all_gather, ring_shares, start_all_to_all
from ..comm.groups import Layout
from ..comm.rounded import LEAST_CHANNELS, exchange, pack, unpack
from ..tokens.block_tokens import BlockTokens
from .guides import Guides
from .head_groups import by_rank_view, head_count, head_groups, is_even, one_each, sharing_heads
from .kernel_choice import kernel_for
from .kernels import HALVES, HEAD_DIM, additive, attend_with_lse, merge


@dataclass(frozen=True)
class Streams:
    """The streams of one call's tokens. `queries`: None for queries that every rank has whole; `guides`: LTX's, which
    replace the mask."""

    queries: str | None
    keys: str
    guides: Guides | None


class StaleKeys(Protocol):
    """The source of keys and values for tokens that a PipeFusion stage's call lacks (engine/stages/stale_keys.py)."""

    def meet_mask(self) -> None: ...
    def newest(self, k: Tensor, v: Tensor, stream: str) -> tuple[Tensor, Tensor]: ...


@dataclass(eq=False)
class SequenceAttention:
    """The attention.Replacement in one call of a block. `attends`: one entry per attention call inside, in order;
    `block`: has the attribute that a Window names; `guides`: the value of the argument that a Guided names; `wish`: the
    kernel over a ring, one of options.ATTENTION_KERNELS that works here; `exchange_dtype`: one of
    options.EXCHANGE_DTYPES; `stale_keys`: for a PipeFusion stage. That has the keys of all tokens, so a ring gathers
    the keys of the call's own tokens and merges no partial results: for a patch this sends least."""

    layout: Layout
    tokens: BlockTokens
    attends: tuple[Attends, ...]
    block: nn.Module | None = None
    guides: Guides | None = None
    wish: str = "auto"
    exchange_dtype: str = SAME
    stale_keys: StaleKeys | None = None

    def __post_init__(self) -> None:
        self._ulysses, self._ring = self.layout.ulysses, self.layout.ring
        self._groups = self.layout.strategy.head_groups
        self._rounds = self.exchange_dtype == ROUNDED
        self._coming = iter(self.attends)
        self.calls = 0
        # PairedProjections.arrive, for the block's first attention; None after that.
        self.arrive_projected: Callable[[Sequence[Tensor], str], list[Tensor]] | None = None

    def __call__(self, library: Attend, call: AttentionCall) -> Tensor:
        """Answers a call of attention for this rank's tokens."""
        attends = next(self._coming, None)
        self.calls += 1
        if isinstance(attends, Window):
            call, attends = replace(call, mask=self._band(attends, call.q)), attends.stream
        guides = None
        if isinstance(attends, Guided):
            guides, attends = self.guides, attends.stream
        queries, keys = attends if isinstance(attends, tuple) else (attends, attends)
        if keys is None:
            return library(call)
        by_heads = call.by_heads()
        if by_heads.k.shape[1] != by_heads.v.shape[1]:
            raise RequestError(
                f"Attention has {by_heads.k.shape[1]} heads of keys and {by_heads.v.shape[1]} of values, which devices "
                f"cannot share out. Set ulysses_degree and ring_degree to 1."
            )
        q, k, v = (
            self._local(t, stream)
            for t, stream in ((by_heads.q, queries), (by_heads.k, keys), (by_heads.v, keys))
        )
        # Every head gets its own keys below.
        options = {name: value for name, value in call.options.items() if name != "enable_gqa"}
        out = self._attend(library, by_heads.on(q, k, v, options=options), Streams(queries, keys, guides))
        if queries is not None:
            out = self.tokens.with_stand_ins(out, queries, 2)
        return call.shaped(out)

    def _attend(self, library: Attend, call: AttentionCall, streams: Streams) -> Tensor:
        """Returns attention [B, H, s, D] for this rank's tokens, or for all tokens if queries are whole. `call`: by
        heads."""
        q, k, v, heads = call.q, call.k, call.v, call.heads
        size = self._ulysses.size
        shares = split_sizes(heads, size)
        q_heads = [slice_of(shares, rank) for rank in range(size)]
        group = heads // k.shape[1]  # number of heads that share keys
        mine = q_heads[self._ulysses.index]
        if call.mask is not None:
            call = replace(call, mask=self._full_mask(call.mask, streams, q_heads))
        if streams.queries is None:
            key, value = self.to_heads(
                (k, v), (sharing_heads(q_heads, group),) * 2, self.group_lengths(streams.keys)
            )()
            key, value = self._newest(key, value, call.mask, streams)
            out = self._of_heads(library, call.on(q[:, mine], *one_each(key, value, mine, group)), streams)
            return all_gather(out, shares, self._ulysses, 1)
        if size == 1:
            k, v = self._newest(k, v, call.mask, streams)
            return self._of_heads(library, call.on(q, *one_each(k, v, mine, group)), streams)
        # While one group of heads is computed, the next one is on its way here and the one before on its way back.
        groups = head_groups(shares, self._groups, group)
        lengths = self.group_lengths(streams.queries)
        send = partial(self._send, q, k, v, group, streams.queries, streams.keys)
        if self.arrive_projected is not None:
            send = partial(self._here, self.arrive_projected((q, k, v), streams.keys), mine.start)
            self.arrive_projected = None
        arriving = send(groups[0])
        leaving = []
        for number, of_ranks in enumerate(groups, 1):
            local, arrived = of_ranks[self._ulysses.index], arriving
            if number < len(groups):
                arriving = send(groups[number])
            query, key, value = arrived()
            key, value = self._newest(key, value, call.mask, streams)
            mask = call.mask
            if mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
                mask = mask[:, local.start - mine.start : local.stop - mine.start]
            of_group = call.on(query, *one_each(key, value, local, group), mask=mask)
            out = self._of_heads(library, of_group, streams)
            leaving.append(self._to_tokens(out, of_ranks, lengths))
        whole = out.new_empty(out.shape[0], lengths[self._ulysses.index], heads, out.shape[3])
        for arrive in leaving:
            arrive(whole)
        return whole.transpose(1, 2)

    def _newest(self, k: Tensor, v: Tensor, mask: Tensor | None, streams: Streams) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all tokens in a PipeFusion stage; elsewhere k and v unchanged."""
        if self.stale_keys is None:
            return k, v
        if mask is not None or streams.guides is not None:
            self.stale_keys.meet_mask()
        if self._ring.size > 1 and k.shape[1]:
            lengths = self._ring_lengths(streams.keys)
            k, v = self._received(all_gather(self._to_send(k, v), lengths, self._ring), k.dtype)
        return self.stale_keys.newest(k, v, streams.keys)

    def _of_heads(self, library: Attend, call: AttentionCall, streams: Streams) -> Tensor:
        """Returns attention [B, h, S, D] for some heads and all tokens of this rank's Ulysses group."""
        is_passed_on = self._ring.size > 1 and self.stale_keys is None
        q = call.q
        if is_passed_on and call.heads:  # even without tokens: the other ranks wait in the ring
            return self._over_ring(call, streams)
        if not q.numel():
            return q.new_empty(*q.shape[:3], call.v.shape[3])
        mask, first = self._of_queries(call.mask, streams)
        if streams.guides is None:
            return library(call if mask is None else replace(call, mask=mask))
        # ComfyUI sets it for these masks.
        exact = replace(call, options={**call.options, "low_precision_attention": False})
        parts = streams.guides.of_queries(first, q.shape[2])
        return torch.cat([library(replace(exact, q=q[:, :, local], mask=part)) for local, part in parts], 2)

    def _of_queries(self, mask: Tensor | None, streams: Streams) -> tuple[Tensor | None, int]:
        """Returns (the mask for the queries of this Ulysses group, the number of its first query)."""
        local = slice(0, None)
        if streams.queries is not None:
            local = slice_of(self._ring_lengths(streams.queries), self._ring.index)
            if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
                mask = mask[..., local, :]
        return mask, local.start

    def _send(
        self, q: Tensor, k: Tensor, v: Tensor, group: int, queries: str, keys: str, heads: list[slice]
    ) -> Callable[[], list[Tensor]]:
        """Starts to exchange tokens for `heads`; returns a function that waits for this rank's q, k and v."""
        sharing = sharing_heads(heads, group)
        if queries == keys:
            return self.to_heads((q, k, v), (heads, sharing, sharing), self.group_lengths(keys))
        query = self.to_heads((q,), (heads,), self.group_lengths(queries))
        pair = self.to_heads((k, v), (sharing, sharing), self.group_lengths(keys))
        return lambda: [*query(), *pair()]

    def _here(self, arrived: list[Tensor], first: int, heads: list[slice]) -> Callable[[], list[Tensor]]:
        """Replaces `_send` for tensors that have arrived. `first`: the number of the first head of `arrived`."""
        local = heads[self._ulysses.index]
        return lambda: [t[:, local.start - first : local.stop - first] for t in arrived]

    def _band(self, window: Window, q: Tensor) -> Tensor | None:
        """Returns a window's mask [1, 1, S, S] over all tokens, to be added to the scores; None for no limit."""
        reach: int | None = operator.attrgetter(window.attribute)(self.block)
        if reach is None:
            return None
        places = torch.arange(self.tokens.total(window.stream), device=q.device)
        far = (places[:, None] - places).abs() > reach
        mask = torch.zeros(far.shape, device=q.device, dtype=q.dtype)
        return mask.masked_fill_(far, torch.finfo(q.dtype).min)[None, None]

    def group_lengths(self, stream: str) -> tuple[int, ...]:
        """Returns the number of tokens on each rank of this rank's Ulysses group."""
        size = self._ulysses.size
        return self.tokens.lengths(stream)[self._ring.index * size : (self._ring.index + 1) * size]

    def _ring_lengths(self, stream: str) -> tuple[int, ...]:
        """Returns the number of tokens in each Ulysses group."""
        size, lengths = self._ulysses.size, self.tokens.lengths(stream)
        return tuple(sum(lengths[group * size : (group + 1) * size]) for group in range(self._ring.size))

    def to_heads(
        self, tensors: tuple[Tensor, ...], heads: tuple[list[slice], ...], lengths: tuple[int, ...]
    ) -> Callable[[], list[Tensor]]:
        """Starts one exchange of tensors [B, H, s, D]; returns a function that waits for [B, h, S, D] each: the group's
        tokens (`lengths`: per rank) for this rank's heads (`heads`: for each tensor, per rank). Tokens come first in
        the buffer, so the received data is contiguous and needs no copy."""
        ranks, index = self._ulysses.size, self._ulysses.index
        if ranks == 1:
            return lambda: list(tensors)
        batch, _, tokens, _ = tensors[0].shape
        pairs = list(zip(tensors, heads, strict=True))
        columns = [[head_count(local[rank]) * t.shape[3] for t, local in pairs] for rank in range(ranks)]
        rows, widths = batch * tokens, [sum(of_rank) for of_rank in columns]
        send = tensors[0].new_empty(rows * sum(widths))
        if all(is_even(local) for _, local in pairs):  # then one copy of each tensor serves all ranks
            parts = send.view(ranks, tokens, batch, widths[0]).split(columns[0], dim=3)
            for part, (t, of) in zip(parts, pairs, strict=True):
                local = by_rank_view(t, of, 1).permute(1, 2, 0, 4, 3)
                part.unflatten(3, local.shape[3:]).copy_(local)
        else:
            for rank, for_rank in enumerate(send.split([rows * width for width in widths])):
                parts = for_rank.view(tokens, batch, widths[rank]).split(columns[rank], dim=2)
                for part, (t, of) in zip(parts, pairs, strict=True):
                    local = t[:, of[rank]].permute(2, 0, 1, 3)
                    part.unflatten(2, local.shape[2:]).copy_(local)
        sizes = tuple(rows * width for width in widths)
        channels = math.gcd(*(t.shape[3] for t in tensors))
        received = self.exchange(send, sizes, tuple(batch * n * widths[index] for n in lengths), channels)

        def arrive() -> list[Tensor]:
            parts = received().view(sum(lengths), batch, widths[index]).split(columns[index], dim=2)
            return [
                part.unflatten(2, (head_count(local[index]), t.shape[3])).permute(1, 2, 0, 3)
                for part, (t, local) in zip(parts, pairs, strict=True)
            ]

        return arrive

    def _to_tokens(
        self, out: Tensor, heads: list[slice], lengths: tuple[int, ...]
    ) -> Callable[[Tensor], None]:
        """Starts to send [B, h, S, D] back to the ranks of its tokens. Returns a function that waits for this rank's
        tokens of all `heads` and writes them into the tensor [B, s, H, D] that it gets."""
        batch, local, _, channels = out.shape
        mine = lengths[self._ulysses.index]
        counts = [head_count(of_rank) for of_rank in heads]
        received = self.exchange(
            out.permute(2, 0, 1, 3).flatten(),
            tuple(n * batch * local * channels for n in lengths),
            tuple(mine * batch * count * channels for count in counts),
            channels,
        )

        def arrive(whole: Tensor) -> None:
            arrived = received()
            if is_even(heads):
                by_rank = arrived.view(len(heads), mine, batch, local, channels)
                by_rank_view(whole, heads, 2).copy_(by_rank.permute(2, 1, 0, 4, 3))
                return
            of_ranks = arrived.split([mine * batch * count * channels for count in counts])
            for part, count, of in zip(of_ranks, counts, heads, strict=True):
                whole[:, :, of] = part.view(mine, batch, count, channels).transpose(0, 1)

        return arrive

    def exchange(
        self, send: Tensor, send_sizes: tuple[int, ...], receive_sizes: tuple[int, ...], channels: int
    ) -> Callable[[], Tensor]:
        """Starts an all-to-all, rounded if requested. `channels`: length of a vector; divides all sizes."""
        start = partial(start_all_to_all, axis=self._ulysses, overlaps=self._groups > 1)
        if self._rounds and channels >= LEAST_CHANNELS:
            return exchange(start, send, send_sizes, receive_sizes, channels)
        return start(send, send_sizes, receive_sizes)

    def _over_ring(self, call: AttentionCall, streams: Streams) -> Tensor:
        """Returns attention [B, h, s, D] of this group's tokens over the keys and values of all groups."""
        q, scale, guides = call.q, call.options.get("scale"), streams.guides
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)
        sizes, index = self._ring_lengths(streams.keys), self._ring.index
        mask, first = self._of_queries(call.mask, streams)
        if mask is not None:
            mask = additive(mask, q.dtype).expand(-1, -1, q.shape[2], -1)
        shares = ring_shares(self._to_send(call.k, call.v), sizes, self._ring)
        wish = self.wish if q.dtype in HALVES and q.shape[-1] == HEAD_DIM else "auto"
        kernel = kernel_for(q.device, q.dtype, wish, ring=True, head_dim=q.shape[-1]).name

        def partial_results() -> Iterator[tuple[Tensor, Tensor]]:
            for hop, share in enumerate(shares):
                if not len(share):
                    continue  # a group without tokens adds nothing, and kernels fail on zero keys
                key, value = self._received(share, q.dtype)
                local = slice_of(sizes, (index - hop) % len(sizes))
                if guides is not None:
                    yield guides.attend_with_lse(q, first, key, value, local, kernel)
                    continue
                part = None if mask is None else mask[..., local]
                yield attend_with_lse(q, key, value, part, kernel)

        return merge(partial_results(), q.dtype)

    def _to_send(self, k: Tensor, v: Tensor) -> Tensor:
        """Returns keys and values [B, h, s, D] as a ring sends them: [s, 2, B, h, …], rounded if requested."""
        pairs = torch.stack([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=1)
        return pack(pairs) if self._rounds and pairs.shape[-1] >= LEAST_CHANNELS else pairs

    def _received(self, pairs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reverses `_to_send`: returns keys and values [B, h, s, D] in `dtype`."""
        known = pairs if pairs.dtype == dtype else unpack(pairs, dtype)
        return known[:, 0].permute(1, 2, 0, 3), known[:, 1].permute(1, 2, 0, 3)

    def _full_mask(self, mask: Tensor, streams: Streams, heads: list[slice]) -> Tensor:
        """Returns the mask for this rank's heads over all keys, in the order in which an exchange brings them.

        A mask over this rank's keys only, made from tokens already cut, is gathered first.
        """
        queries, keys = streams.queries, streams.keys
        lengths, total = self.tokens.lengths(keys), self.tokens.total(keys)
        if max(lengths) == total and len(lengths) > 1:  # a part and the whole then have the same length
            raise RequestError(
                f"{total} tokens with an attention mask are too few for {len(lengths)} devices. Set ulysses_degree and "
                f"ring_degree to 1."
            )
        if mask.shape[-1] == total:
            order = self.tokens.order(keys, mask.device)
            mask = mask.index_select(-1, order)
        else:
            flags = mask.dtype == torch.bool  # not every transport carries bool
            mask = self.tokens.local(mask, keys, mask.ndim - 1)
            mask = all_gather(mask.to(torch.uint8) if flags else mask, lengths, self.tokens.axis, -1)
            mask = mask.bool() if flags else mask
        if queries is not None and mask.ndim > 1 and mask.shape[-2] == self.tokens.total(queries) > 1:
            mask = mask.index_select(-2, self.tokens.order(queries, mask.device))
        if mask.ndim == 4 and mask.shape[1] > 1:
            mask = mask[:, heads[self._ulysses.index]]
        return mask

    def _local(self, tensor: Tensor, stream: str | None) -> Tensor:
        """Removes stand-ins from `tensor`. Raises RequestError if its token count contradicts the table of blocks."""
        if stream is None:
            return tensor
        if tensor.shape[2] != self.tokens.held(stream):
            raise RequestError(
                f"Attention has {tensor.shape[2]} tokens of {stream} where {self.tokens.held(stream)} belong to this "
                f"device, so this version of ComfyUI computes it another way. Set ulysses_degree and ring_degree to 1."
            )
        return self.tokens.local(tensor, stream, 2)
