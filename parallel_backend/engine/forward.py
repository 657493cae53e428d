"""One model call under a strategy: rows and tokens go out to the ranks, the full velocity comes back to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..layout import slice_of, split_sizes
from ..models.flux.module import FluxModel
from ..models.flux.packing import text_ids, unpack
from ..options import APPROXIMATE_KERNELS
from ..requests import LATENT_CHANNELS
from .attention.patch_diffusers import SharedAttention
from .collectives import Traffic, all_gather
from .compile import Blocks
from .groups import Layout
from .image_tokens import ResidualShares, image_tokens, mask_in_order
from .rows import Rows, batched, take
from .token_split import TokenPlan


class Engine(SharedAttention, Protocol):
    """An exact attention over the sequence axis. `plan` is set before each model call."""

    name: str
    kernel: str  # that computes with this plan and mask, one of options.ATTENTION_KERNELS
    takes_masks: bool  # whether it has a `mask`, to be set with `plan`
    plan: TokenPlan

    def prepare(self) -> None:
        """Called on every rank before each forward, also where it has no rows; may be collective."""

    def refusal(self, plan: TokenPlan) -> str | None:
        """Why this engine cannot compute `plan` exactly, in a user's words; None when it can."""


@dataclass(frozen=True)
class Share:
    """What one rank computes of a model call. `parts`: each a call of the transformer.

    `first`: its first row among the `total`;
    `idle`: calls that only other ranks make, but for whose weights this one is needed.
    """

    parts: list[Rows]
    first: int
    total: int
    idle: int


@dataclass(frozen=True)
class TransformerCall:
    """One call of the transformer: the arguments of FluxModel.velocity for this rank's tokens, and what its attention
    and its result need."""

    inputs: dict[str, object]
    plan: TokenPlan
    mask: Tensor | None
    own_tokens: int
    size: tuple[int, int]


class ParallelForward:
    """Callable: `forward(rows) -> velocities`, one [r, C, h, w] float32 per entry, complete on every rank.

    Rows of all entries are numbered through and shared out over the row axis (data x cfg); a rank without rows joins
    the last gather, and the gathers of weights where these are sharded. The tokens of a row, text and image, are shared
    out over the sequence axis (ring x ulysses). The first of `engines` that is exact for the token counts computes
    attention.
    """

    warmup_steps = None  # all steps are exact

    def __init__(
        self, model: FluxModel, layout: Layout, engines: list[Engine], traffic: Traffic, blocks: Blocks
    ) -> None:
        self.model = model
        self.layout = layout
        self.traffic = traffic
        self._engines = engines
        self._blocks = blocks
        self.engine = engines[0].name
        self.kernel = engines[0].kernel
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

    def shared_out(self, rows: list[Rows], compute: Callable[[Share], list[Tensor]]) -> list[Tensor]:
        """The model call, of which `compute` does this rank's share: the velocities of its parts."""
        for engine in self._engines:
            engine.prepare()
        axis = self.layout.row
        counts = [len(entry.x) for entry in rows]
        shares = split_sizes(sum(counts), axis.size)
        mine = slice_of(shares, axis.index)
        parts = batched(take(rows, mine))
        idle = 0
        if self.model.gathers is not None:  # ranks gather weights from each other in every call
            idle = max(len(batched(take(rows, slice_of(shares, i)))) for i in range(axis.size)) - len(parts)
        outputs = compute(Share(parts, mine.start, sum(counts), idle))
        like = rows[0].x
        empty = like.new_empty(0, LATENT_CHANNELS, *like.shape[2:], dtype=torch.float32)
        velocities = torch.cat(outputs) if outputs else empty
        return list(all_gather(velocities, shares, axis, self.traffic).split(counts))

    def join_gathers(self, calls: int, blocks: range | None = None) -> None:
        """Gathers weights for calls, through `blocks` or all of them, that only other ranks make."""
        for _ in range(calls):
            self.model.gathers.join_gathers(blocks)

    def _velocities(self, work: Share) -> list[Tensor]:
        outputs = []
        for part in work.parts:
            call = self.begin(part)
            self.make_ready(call)
            outputs.append(self.end(call, self.model.velocity(**call.inputs)))
        self.join_gathers(work.idle)
        return outputs

    def begin(self, rows: Rows) -> TransformerCall:
        """The call of the transformer for a few rows, with this rank's tokens."""
        axis = self.layout.sequence
        image_side = image_tokens(rows)
        prompt, extras = rows.conditioning, rows.extras
        plan = TokenPlan.split(
            prompt.context.shape[1], image_side.count, axis.size, self.layout.sequence_shares
        )
        text, image = slice_of(plan.text, axis.index), slice_of(plan.image, axis.index)

        residuals = ResidualShares(
            extras.residuals, image, image_side.count, self.device, self.model.compute_dtype
        )
        inputs = dict(
            img_tokens=image_side.tokens[:, image],
            context=prompt.context[:, text],
            pooled=prompt.pooled,
            sigma=rows.sigma,
            guidance=prompt.guidance,
            img_ids=image_side.ids[image],
            txt_ids=text_ids(prompt.context.shape[1], self.device)[text],
            residuals=residuals if extras.residuals else None,
        )
        return TransformerCall(inputs, plan, extras.mask, image_side.own, tuple(rows.x.shape[-2:]))

    def make_ready(self, call: TransformerCall) -> None:
        """Has attention computed for this call, until it is for another."""
        self._use_engine_for(call.plan, call.mask)

    def end(self, call: TransformerCall, output: Tensor) -> Tensor:
        """From the transformer's output the velocity [r, C, h, w] float32, on every rank of the sequence axis."""
        axis = self.layout.sequence
        if axis.size > 1:  # tokens first, so that shares gather into one contiguous tensor
            output = all_gather(output.transpose(0, 1), call.plan.image, axis, self.traffic).transpose(0, 1)
        return unpack(output[:, : call.own_tokens], *call.size)

    def _use_engine_for(self, plan: TokenPlan, mask: Tensor | None) -> None:
        for engine in self._engines:
            reason = engine.refusal(plan)
            if mask is not None and not engine.takes_masks:
                reason = "it computes no attention masks"
            if reason is None:
                break
            note = f"engine {engine.name} stood back: {reason}; native took its place"
            if note not in self.notes:
                self.notes.append(note)
        self.engine = engine.name
        engine.plan = plan
        if engine.takes_masks:
            engine.mask = (
                None
                if mask is None
                else mask_in_order(mask, plan.order, self.model.compute_dtype, self.device)
            )
        self.kernel = engine.kernel
        self._blocks.use(self.model.transformer, engine)
