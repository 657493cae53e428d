"""One model call under a strategy: rows and tokens go out to the ranks, the full velocity comes back to each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..layout import slice_of, split_sizes
from ..models.base import Attention, TokenModel, TokenShare
from ..options import APPROXIMATE_KERNELS
from ..requests import Rows
from .blocks.compile import Blocks
from .comm.collectives import all_gather, broadcast
from .comm.groups import Layout
from .comm.traffic_counter import Traffic
from .extras import OrderedMasks, ResidualShares
from .rows import batched, take
from .token_split import TokenPlan


class CallAttention(Attention, Protocol):
    """The attention of one model call, exact over the sequence axis."""

    @property
    def kernel(self) -> str:
        """The kernel that computes it, one of options.ATTENTION_KERNELS."""


class AttentionEngine(Protocol):
    """Makes the attention of each model call."""

    @property
    def name(self) -> str: ...

    @property
    def takes_masks(self) -> bool: ...

    def prepare(self) -> None:
        """Called on every rank before each forward, also where it has no rows; may be collective."""

    def refusal(self, plan: TokenPlan) -> str | None:
        """Why this engine cannot compute `plan` exactly, in a user's words; None when it can."""

    def of_call(self, plan: TokenPlan, mask: Tensor | None = None) -> CallAttention:
        """`mask`: what is added to the scores, [r, 1, S, S] over the tokens of all ranks, rank by rank."""


@dataclass(frozen=True)
class RowShare:
    """A rank's share of the rows of a model call. `parts`: each a call of the model.

    `first`: its first row among the `total`;
    `idle`: calls that only other ranks make, but for whose weights this one is needed.
    """

    parts: list[Rows]
    first: int
    total: int
    idle: int


@dataclass(frozen=True)
class ModelCall:
    """One call of the model: this rank's tokens, their attention, and what its result needs.

    `own`: image tokens of the image itself; `size`: its latent's height and width.
    """

    share: TokenShare
    attention: CallAttention
    plan: TokenPlan
    own: int
    size: tuple[int, int]


class ParallelForward:
    """`forward(rows) -> velocities` (sampling.denoise.Forward), one [r, C, h, w] float32 per entry, complete on every
    rank.

    Rows of all entries are numbered through and shared out over the row axis (data x cfg); a rank without rows joins
    the last gather, and the gathers of weights where these are sharded. The tokens of a row, text and image, are shared
    out over the sequence axis (ring x ulysses). The first of `engines` that is exact for the token counts computes
    attention.
    """

    patchwise = None  # all steps are exact

    def __init__(
        self,
        model: TokenModel,
        layout: Layout,
        engines: list[AttentionEngine],
        traffic: Traffic,
        blocks: Blocks,
    ) -> None:
        self.model = model
        self.layout = layout
        self.traffic = traffic
        self._engines = engines
        self._blocks = blocks
        self._masks = OrderedMasks()
        # What ran last, and what there is to say about it.
        self.engine = engines[0].name
        self.kernel = engines[0].of_call(TokenPlan.split(0, 0, layout.sequence.size)).kernel
        self.notes: list[str] = []

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def bytes_sent(self) -> int:
        return self.traffic.bytes_sent

    @property
    def compiles(self) -> bool:
        return self._blocks.compiles

    @property
    def exact(self) -> bool:
        """Whether its result is that of one device computing exactly."""
        return self.kernel not in APPROXIMATE_KERNELS

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        return self.shared_out(rows, self._velocities)

    def from_first(self, tensor: Tensor) -> Tensor:
        return broadcast(tensor, 0, self.layout.everyone, self.traffic)

    def shared_out(self, rows: list[Rows], compute: Callable[[RowShare], list[Tensor]]) -> list[Tensor]:
        """The model call, of which `compute` does this rank's share: the velocities of its parts."""
        for engine in self._engines:
            engine.prepare()
        axis = self.layout.row
        counts = [len(entry.x) for entry in rows]
        shares = split_sizes(sum(counts), axis.size)
        mine = slice_of(shares, axis.index)
        parts = batched(take(rows, mine))
        idle = 0
        if self.model.sharding is not None:  # ranks gather weights from each other in every call
            idle = max(len(batched(take(rows, slice_of(shares, i)))) for i in range(axis.size)) - len(parts)
        outputs = compute(RowShare(parts, mine.start, sum(counts), idle))
        like = rows[0].x
        empty = like.new_empty(0, self.model.latent_channels, *like.shape[2:], dtype=torch.float32)
        velocities = torch.cat(outputs) if outputs else empty
        return list(all_gather(velocities, shares, axis, self.traffic).split(counts))

    def join_gathers(self, calls: int, blocks: range | None = None) -> None:
        """Gathers weights for calls, through `blocks` or all of them, that only other ranks make."""
        for _ in range(calls):
            assert self.model.sharding is not None, "else no rank is idle"
            self.model.sharding.join_gathers(blocks)

    def _velocities(self, work: RowShare) -> list[Tensor]:
        outputs = []
        for part in work.parts:
            call = self.begin(part)
            with self.running(call) as attention:
                output, _ = self.model.through(0, call.share, attention)
            outputs.append(self.end(call, output))
        self.join_gathers(work.idle)
        return outputs

    def begin(self, rows: Rows) -> ModelCall:
        """The call of the model for a few rows, with this rank's tokens."""
        axis, model = self.layout.sequence, self.model
        side = model.image_tokens(rows)
        prompt, extras = rows.conditioning, rows.extras
        plan = TokenPlan.split(prompt.context.shape[1], side.count, axis.size, self.layout.sequence_shares)
        text, image = slice_of(plan.text, axis.index), slice_of(plan.image, axis.index)
        residuals = ResidualShares(extras.residuals, image, side.count, self.device, model.compute_dtype)
        share = TokenShare(
            image=side.tokens[:, image],
            text=prompt.context[:, text],
            ids=side.ids[image],
            sigma=rows.sigma,
            prompt=prompt,
            residuals=residuals if extras.residuals else None,
        )
        height, width = rows.x.shape[-2:]
        return ModelCall(share, self._attention(plan, extras.mask), plan, side.own, (height, width))

    def running(self, call: ModelCall) -> AbstractContextManager[Attention]:
        """Inside, blocks run as they shall; gives the attention to hand to the model."""
        return self._blocks.running(self.model, 0, call.attention)

    def end(self, call: ModelCall, output: Tensor) -> Tensor:
        """From the model's output the velocity [r, C, h, w] float32, on every rank of the sequence axis."""
        axis, output = self.layout.sequence, output.float()
        if axis.size > 1:  # tokens first, so that shares gather into one contiguous tensor
            output = all_gather(output.transpose(0, 1), call.plan.image, axis, self.traffic).transpose(0, 1)
        return self.model.unpack(output[:, : call.own], *call.size)

    def _attention(self, plan: TokenPlan, mask: Tensor | None) -> CallAttention:
        """The attention of the first engine that can compute it; those before it are noted down."""
        for engine in self._engines:
            reason = engine.refusal(plan)
            if mask is not None and not engine.takes_masks:
                reason = "it computes no attention masks"
            if reason is None:
                break
            note = f"engine {engine.name} fell back to native: {reason}"
            if note not in self.notes:
                self.notes.append(note)
        added = None
        if mask is not None:
            added = self._masks.get(mask, plan.order, self.model.compute_dtype, self.device)
        attention = engine.of_call(plan, added)
        self.engine, self.kernel = engine.name, attention.kernel
        return attention
