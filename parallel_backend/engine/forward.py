"""One model call under a strategy: rows and tokens go out to the ranks, the full velocity comes back to each."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..models.flux import FluxModel
from ..models.packing import text_ids, unpack
from ..requests import LATENT_CHANNELS
from ..shares import share, span
from .adjust_diffusers import SharedAttention, share_attention
from .collectives import Traffic, all_gather
from .groups import Layout
from .image_tokens import image_tokens, mask_in_order, residual_share
from .plan import TokenPlan
from .rows import Rows, batched, take


class Engine(SharedAttention, Protocol):
    """An exact attention over the sequence axis. `plan` is set before each model call."""

    name: str
    takes_masks: bool  # whether it has a `mask`, to be set with `plan`
    plan: TokenPlan

    def prepare(self) -> None:
        """Called on every rank before each forward, also where it has no rows; may be collective."""

    def refusal(self, plan: TokenPlan) -> str | None:
        """Why this engine cannot compute `plan` exactly, in a user's words; None when it can."""


class ParallelForward:
    """Callable: `forward(rows) -> velocities`, one [r, C, h, w] float32 per entry, complete on every rank.

    Rows of all entries are numbered through and shared out over the row axis (data x cfg); a rank without rows joins
    the last gather, and the gathers of weights where these are sharded. The tokens of a row, text and image, are shared
    out over the sequence axis (ring x ulysses). The first of `engines` that is exact for the token counts computes
    attention.
    """

    warmup_steps = None  # all steps are exact
    exact = True

    def __init__(self, model: FluxModel, layout: Layout, engines: list[Engine], traffic: Traffic) -> None:
        self._model = model
        self._layout = layout
        self._engines = engines
        self._traffic = traffic
        self.engine = engines[0].name
        self.notes: list[str] = []

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def bytes_sent(self) -> int:
        return self._traffic.bytes_sent

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        for engine in self._engines:
            engine.prepare()
        axis = self._layout.row
        counts = [len(entry.x) for entry in rows]
        shares = share(sum(counts), axis.size)
        parts = batched(take(rows, span(shares, axis.index)))
        outputs = [self._predict(part) for part in parts]
        if self._model.sit_out is not None:  # ranks gather weights from each other in every call
            calls = max(len(batched(take(rows, span(shares, i)))) for i in range(axis.size))
            for _ in range(calls - len(parts)):
                self._model.sit_out()
        like = rows[0].x
        empty = like.new_empty(0, LATENT_CHANNELS, *like.shape[2:], dtype=torch.float32)
        mine = torch.cat(outputs) if outputs else empty
        return list(all_gather(mine, shares, axis, self._traffic).split(counts))

    def _predict(self, rows: Rows) -> Tensor:
        """The velocity of a few rows, [r, C, h, w] float32, on every rank of the sequence axis."""
        axis = self._layout.sequence
        image_side = image_tokens(rows)
        prompt, extras = rows.conditioning, rows.extras
        plan = TokenPlan.split(
            prompt.context.shape[1], image_side.count, axis.size, self._layout.sequence_shares
        )
        text, image = span(plan.text, axis.index), span(plan.image, axis.index)
        self._use_engine_for(plan, extras.mask)

        def residual(block: int) -> Tensor | None:
            added = extras.residuals.get(block)
            return None if added is None else residual_share(added, image, image_side.count, self.device)

        output = self._model.velocity(
            img_tokens=image_side.tokens[:, image],
            context=prompt.context[:, text],
            pooled=prompt.pooled,
            sigma=rows.sigma,
            guidance=prompt.guidance,
            img_ids=image_side.ids[image],
            txt_ids=text_ids(prompt.context.shape[1], self.device)[text],
            residuals=residual if extras.residuals else None,
        )
        if axis.size > 1:  # tokens first, so that shares gather into one contiguous tensor
            output = all_gather(output.transpose(0, 1), plan.image, axis, self._traffic).transpose(0, 1)
        return unpack(output[:, : image_side.own], *rows.x.shape[-2:])

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
                else mask_in_order(mask, plan.order, self._model.compute_dtype, self.device)
            )
        share_attention(self._model.transformer, engine)
