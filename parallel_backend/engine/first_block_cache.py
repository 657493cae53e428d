"""First Block Cache over all ranks: model calls whose first block says little that is new skip the other blocks.

First Block Cache (chengzeyi, ParaAttention, 2024; diffusers/hooks/first_block_cache.py), a simple form of TeaCache (Liu
et al. 2024). diffusers' hooks decide on each rank by its own tokens, so ranks would go different ways, and inside a
block's forward, where a compiled block cannot. Here ranks add up what they saw and decide between the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..models.base import FirstBlockOutput
from ..requests import Rows, SamplerState
from .comm.collectives import all_gather
from .forward import ParallelForward, RowShare

MakeState = Callable[[], SamplerState]


class CachedForward:
    """`forward(rows) -> velocities` of one sampling job, some of them approximate; it ends with the job.

    The first block always runs. Where what it added to the image differs from what it added in the last call that was
    computed, by less than `threshold` of it (mean absolute difference over mean absolute value, over all tokens of a
    row), the other blocks are taken to add what they added then. The row that differs most decides for all rows, so
    that the result does not depend on which rank has which row.

    All ranks decide from the same sums, added in the same order, so they always agree, and a run repeated is the same
    to the bit. Under another strategy activations are rounded otherwise, so a difference that lies that near to the
    threshold (measured on the demo model: 1e-6 of it in float32, 1e-2 in bfloat16) may be decided otherwise. Rounding
    it before it is compared would only move the place where that happens.
    """

    patchwise = None  # whole images only

    def __init__(self, forward: ParallelForward, threshold: float, state: SamplerState | None = None) -> None:
        """`state`: of a job that is resumed; its counts go on, what was cached is gone."""
        self._forward = forward
        self._threshold = threshold
        self._world = forward.layout.everyone
        # Of each part what the first block changed and what the others did, in the last call that was computed.
        self._kept: list[tuple[Tensor, Tensor]] | None = None
        self.calls = 0 if state is None else state.calls
        self.reused = 0 if state is None else state.reused

    @property
    def device(self) -> torch.device:
        return self._forward.device

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        self.calls += 1
        return self._forward.shared_out(rows, self._velocities)

    def from_first(self, tensor: Tensor) -> Tensor:
        return self._forward.from_first(tensor)

    def kept_by(self, keep: Callable[[MakeState], None]) -> Callable[[MakeState], None]:
        """`keep` (sampling.denoise.Keep) of states that also say what was reused until then."""

        def counted(make: MakeState) -> None:
            calls, reused = self.calls, self.reused

            def state() -> SamplerState:
                made = make()
                return replace(made, exact=made.exact and not reused, calls=calls, reused=reused)

            keep(state)

        return counted

    def _velocities(self, share: RowShare) -> list[Tensor]:
        forward, model = self._forward, self._forward.model
        calls = [forward.begin(part) for part in share.parts]
        begun = []
        for call in calls:
            with forward.running(call) as attention:
                begun.append(model.first_block(call.share, attention))
        forward.join_gathers(share.idle, range(1))
        outputs = []
        if self._kept is not None and self._is_near(share, begun, self._kept):
            self.reused += 1
            forward.join_gathers(share.idle, range(0))
            for call, one, (_, added) in zip(calls, begun, self._kept, strict=True):
                outputs.append(forward.end(call, model.last_layer(one, added, call.share)))
            return outputs
        self._kept = []
        for call, one in zip(calls, begun, strict=True):
            with forward.running(call) as attention:
                output, added = model.other_blocks(one, call.share, attention)
            self._kept.append((one.change, added))
            outputs.append(forward.end(call, output))
        forward.join_gathers(share.idle, range(1, len(model.blocks[0])))
        return outputs

    def _is_near(
        self, share: RowShare, begun: list[FirstBlockOutput], kept: list[tuple[Tensor, Tensor]]
    ) -> bool:
        """Whether no row of any rank changed too much; the same on all ranks. Collective."""
        sums = torch.zeros(share.total, 2, dtype=torch.float64, device=self.device)
        row = share.first
        for one, (before, _) in zip(begun, kept, strict=True):
            here = slice(row, row + len(before))
            sums[here, 0] = _absolute(one.change.float() - before)
            sums[here, 1] = _absolute(before)
            row = here.stop
        return self._largest(sums) < self._threshold  # NaN, where there was no change to compare with, is not

    def _largest(self, sums: Tensor) -> float:
        """The largest relative change of a row. `sums` [rows, 2]: of this rank's tokens, 0 for rows of others."""
        sizes = (sums.numel(),) * self._world.size
        # Gathered and added here, not reduced on the way: so the order is the same on all ranks and in every run.
        gathered = all_gather(sums.flatten(), sizes, self._world, self._forward.traffic).cpu()
        change, before = gathered.view(-1, *sums.shape).sum(0).unbind(1)
        return (change / before).max().item()


def _absolute(tensor: Tensor) -> Tensor:
    """Sums of absolute values, one per row: [r, n, hidden] -> [r] float64."""
    return tensor.abs().sum(dim=-1, dtype=torch.float32).sum(dim=-1, dtype=torch.float64)
