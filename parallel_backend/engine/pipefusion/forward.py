"""PipeFusion's forward: whole images, exactly, or patches that flow through the stages from one model call to the next.

PipeFusion (Wang, Fang et al. 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes
from ...models.flux.module import FluxModel
from ...models.flux.packing import token_grid, unpack
from ...options import APPROXIMATE_KERNELS
from ...requests import LATENT_CHANNELS
from ..attention.native import NativeAttention
from ..collectives import Traffic, all_gather, broadcast
from ..compile import Blocks
from ..groups import Layout
from ..image_tokens import image_tokens
from ..patches import PatchPlan
from ..rows import Rows, take
from .schedule import PipeFusionSchedule, Sampling
from .stage import RowShard, Stage, WorkItem


class PipelineForward:
    """`forward(rows) -> velocities` like ParallelForward's: exact, one [r, C, h, w] float32 per entry, on every rank.

    `by_patches` runs many model calls in one flow, approximately.
    """

    def __init__(
        self,
        model: FluxModel,
        layout: Layout,
        attention: NativeAttention,
        traffic: Traffic,
        blocks: Blocks,
    ) -> None:
        self._model = model
        self._layout = layout
        self._blocks = blocks
        self._attention = attention
        self._traffic = traffic
        self._stage = Stage(model, layout, attention, traffic)
        self.engine = attention.name
        self.warmup_steps: int | None = layout.strategy.warmup_steps
        self._whole = True  # whether images were computed whole in the request that ran last
        self.notes: list[str] = []

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def bytes_sent(self) -> int:
        return self._traffic.bytes_sent

    @property
    def compiles(self) -> bool:
        return self._blocks.compiles

    @property
    def kernel(self) -> str:
        """Which computed attention last (options.ATTENTION_KERNELS)."""
        return self._attention.kernel

    @property
    def exact(self) -> bool:
        """Whether the request that ran last gave what one device computing exactly gives."""
        return self._whole and self.kernel not in APPROXIMATE_KERNELS

    @property
    def samples(self) -> bool:
        """Whether samplers run on this rank while patches flow."""
        return self._stage.is_first

    @property
    def stages(self) -> int:
        return self._layout.pipe.size

    def remember(self, on: bool) -> None:
        """Whether the coming whole images leave their keys and values for patches; what is kept is forgotten."""
        self._stage.memory.clear()
        self._stage.remembers = on

    def share_latent(self, latent: Tensor | None, like: Tensor) -> Tensor:
        """The first stage's latent on every stage. `like`: any tensor of its shape."""
        latent = torch.empty_like(like) if latent is None else latent
        return broadcast(latent.contiguous(), 0, self._layout.return_group, self._traffic)

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        self._use()
        self._whole = True
        counts = [len(entry.x) for entry in rows]
        shares = split_sizes(sum(counts), self._layout.row.size)
        mine = self._own(rows, shares)
        cuts = self._cut(mine, [entry.sigma for entry in mine], first=sum(shares[: self._layout.row.index]))
        sides = [image_tokens(entry) for entry in mine]
        tokens = {cut.number: side.tokens for cut, side in zip(cuts, sides, strict=True)}
        outputs: list[Tensor] = []
        for begin in range(0, len(cuts), self.stages):
            self._stage.turn(
                [WorkItem((cut,)) for cut in cuts[begin : begin + self.stages]],
                enter=lambda item, cut: tokens[cut.number][:, cut.tokens],
                leave=lambda item, cut, image: outputs.append(image),
            )
        self._stage.settle()
        like = rows[0].x
        height, width = like.shape[-2:]
        velocities = [
            unpack(image[:, : side.own], height, width)
            for side, image in zip(sides, self._on_all_stages(cuts, outputs), strict=True)
        ]
        empty = like.new_empty(0, LATENT_CHANNELS, height, width, dtype=torch.float32)
        mine = torch.cat(velocities or [empty])
        return list(all_gather(mine, shares, self._layout.row, self._traffic).split(counts))

    def by_patches(self, rows: list[Rows], sigmas: Sequence[Tensor], sampling: Sampling) -> bool:
        """Runs a model call for each of `sigmas` (scalars), each patch as soon as the call before gave it back.

        Keys and values of patches that a call has not reached yet are those of the call before. `rows`: an entry per
        prompt, each for all images of the batch; their x tells the shape alone. False when `sampling` stopped it, which
        leaves what is under way uncomputed.
        """
        self._use()
        batch = len(rows[0].x)
        shares = split_sizes(batch * len(rows), self._layout.row.size)
        mine = self._own(rows, shares)
        cuts = self._cut(
            mine, [sigmas[0].reshape(1)] * len(mine), first=sum(shares[: self._layout.row.index])
        )
        grid = token_grid(*rows[0].x.shape[-2:])
        patches = split_sizes(
            grid[0] * grid[1], min(self._layout.strategy.pipeline_patches, grid[0] * grid[1])
        )
        self._whole = len(patches) == 1
        flow = PipeFusionSchedule(
            self._stage, self._layout, self._traffic, sampling, cuts, shares, batch, patches
        )
        return flow.run(sigmas)

    def _use(self) -> None:
        for transformer in self._model.chunks:
            self._blocks.use(transformer, self._attention)

    def _own(self, rows: list[Rows], shares: tuple[int, ...]) -> list[Rows]:
        """This pipeline's rows, one by one."""
        wanted = slice_of(shares, self._layout.row.index)
        return [row for i in range(wanted.start, wanted.stop) for row in take(rows, slice(i, i + 1))]

    def _cut(self, rows: list[Rows], sigmas: list[Tensor], first: int) -> list[RowShard]:
        sequence, strategy = self._layout.sequence, self._layout.strategy
        cuts = []
        for i, (entry, sigma) in enumerate(zip(rows, sigmas, strict=True)):
            side = image_tokens(entry)
            plan = PatchPlan.split(
                text=entry.conditioning.context.shape[1],
                image=side.count,
                patches=strategy.pipeline_patches,
                degree=sequence.size,
                ulysses=self._layout.ulysses.size,
                weights=self._layout.sequence_shares,
            )
            tokens = torch.tensor(plan.image_tokens(sequence.index), dtype=torch.long, device=self.device)
            ids = side.ids[tokens]
            cuts.append(RowShard(first + i, entry.conditioning, sigma, plan, tokens, ids, entry.extras))
        return cuts

    def _on_all_stages(self, cuts: list[RowShard], outputs: list[Tensor]) -> Iterator[Tensor]:
        """The last stage's outputs, [1, n, 64] float32 of each row with its tokens in the image's order."""
        sequence = self._layout.sequence
        for i, cut in enumerate(cuts):
            sizes = cut.plan.whole.image
            image = (
                outputs[i].contiguous()
                if self._stage.is_last
                else self._stage.empty_output(WorkItem((cut,)), cut)
            )
            image = broadcast(image, self.stages - 1, self._layout.return_group, self._traffic)
            if sequence.size > 1:
                image = all_gather(image.transpose(0, 1), sizes, sequence, self._traffic).transpose(0, 1)
            order = [token for rank in range(sequence.size) for token in cut.plan.image_tokens(rank)]
            whole = torch.empty_like(image)
            whole[:, order] = image
            yield whole
