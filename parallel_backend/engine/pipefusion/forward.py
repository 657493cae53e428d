"""PipeFusion's forward: whole images, exactly, or patches that flow through the stages from one model call to the next.

PipeFusion (Wang, Fang et al. 2024), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...layout import slice_of, split_sizes
from ...models.base import TokenModel
from ...options import APPROXIMATE_KERNELS
from ...requests import Rows
from ..attention.kv_cache import KVCache
from ..attention.native import NativeAttention
from ..blocks.compile import Blocks
from ..comm.collectives import all_gather, broadcast
from ..comm.groups import Layout
from ..comm.traffic_counter import Traffic
from ..patches import PatchPlan, index_of
from ..rows import take
from .schedule import PipeFusionSchedule, Sampling
from .stage import RowShard, Stage, WorkItem


class PipelineForward:
    """`forward(rows) -> velocities` like ParallelForward's: exact, one [r, C, h, w] float32 per entry, on every rank.

    A run of patches (`start_run`) makes many model calls in one flow, approximately: sampling.denoise.PatchwiseForward.
    """

    def __init__(
        self,
        model: TokenModel,
        layout: Layout,
        attention: NativeAttention,
        traffic: Traffic,
        blocks: Blocks,
    ) -> None:
        self._model = model
        self._layout = layout
        self._blocks = blocks
        self._traffic = traffic
        self._stage = Stage(model, layout, attention, traffic, blocks)
        self.engine = attention.name
        self._whole = True  # whether images were computed whole in the request that ran last
        self.notes: list[str] = []

    @property
    def patchwise(self) -> PipelineForward:
        return self

    @property
    def warmup_steps(self) -> int:
        return self._layout.strategy.warmup_steps

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
        """The kernel that computed attention last (options.ATTENTION_KERNELS)."""
        return self._stage.kernel

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

    def pack(self, latent: Tensor) -> Tensor:
        return self._model.pack(latent)

    def unpack(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return self._model.unpack(tokens, height, width)

    def from_first(self, tensor: Tensor) -> Tensor:
        return broadcast(tensor, 0, self._layout.everyone, self._traffic)

    def from_first_sampler(self, tensor: Tensor) -> Tensor:
        return broadcast(tensor, 0, self._layout.stage, self._traffic)

    def share_latent(self, latent: Tensor | None, like: Tensor) -> Tensor:
        """The first stage's latent on every stage. `like`: any tensor of its shape."""
        latent = torch.empty_like(like) if latent is None else latent
        return broadcast(latent.contiguous(), 0, self._layout.return_group, self._traffic)

    def __call__(self, rows: list[Rows]) -> list[Tensor]:
        return self.whole(rows, None)

    def start_run(self) -> PipeFusionRun:
        """A run of patches, which keeps what the whole images before them leave."""
        return PipeFusionRun(self)

    def whole(self, rows: list[Rows], cache: KVCache | None) -> list[Tensor]:
        """A model call of whole images, which leave their keys and values in `cache`."""
        self._whole = True
        counts = [len(entry.x) for entry in rows]
        shares = split_sizes(sum(counts), self._layout.row.size)
        mine = self._own(rows, shares)
        row_shards = self._row_shards(mine, [entry.sigma for entry in mine], shares)
        sides = [self._model.image_tokens(entry) for entry in mine]
        tokens = {row.number: side.tokens for row, side in zip(row_shards, sides, strict=True)}
        outputs: list[Tensor] = []
        for begin in range(0, len(row_shards), self.stages):
            self._stage.run_round(
                [WorkItem((row,)) for row in row_shards[begin : begin + self.stages]],
                enter=lambda item, row: tokens[row.number][:, row.tokens],
                leave=lambda item, row, image: outputs.append(image),
                cache=cache,
            )
        self._stage.settle()
        like = rows[0].x
        height, width = like.shape[-2:]
        velocities = [
            self._model.unpack(image[:, : side.own], height, width)
            for side, image in zip(sides, self._on_all_stages(row_shards, outputs), strict=True)
        ]
        empty = like.new_empty(0, self._model.latent_channels, height, width, dtype=torch.float32)
        own = torch.cat(velocities or [empty])
        return list(all_gather(own, shares, self._layout.row, self._traffic).split(counts))

    def by_patches(
        self, rows: list[Rows], sigmas: Sequence[Tensor], sampling: Sampling, cache: KVCache
    ) -> bool:
        """See PipeFusionRun.by_patches. `cache`: what the whole images before it have left."""
        batch = len(rows[0].x)
        shares = split_sizes(batch * len(rows), self._layout.row.size)
        mine = self._own(rows, shares)
        row_shards = self._row_shards(mine, [sigmas[0].reshape(1)] * len(mine), shares)
        tokens = self._model.image_tokens(rows[0]).own
        patches = split_sizes(tokens, min(self._layout.strategy.pipeline_patches, tokens))
        self._whole = len(patches) == 1
        schedule = PipeFusionSchedule(
            self._stage, self._layout, self._traffic, sampling, row_shards, shares, batch, patches, cache
        )
        return schedule.run(sigmas)

    def new_cache(self) -> KVCache:
        return KVCache(self._layout.ring.index, self._layout.ring.size)

    def _own(self, rows: list[Rows], shares: tuple[int, ...]) -> list[Rows]:
        """This pipeline's rows, one by one."""
        wanted = slice_of(shares, self._layout.row.index)
        return [row for i in range(wanted.start, wanted.stop) for row in take(rows, slice(i, i + 1))]

    def _row_shards(self, rows: list[Rows], sigmas: list[Tensor], shares: tuple[int, ...]) -> list[RowShard]:
        sequence, strategy = self._layout.sequence, self._layout.strategy
        first = slice_of(shares, self._layout.row.index).start
        row_shards = []
        for i, (entry, sigma) in enumerate(zip(rows, sigmas, strict=True)):
            side = self._model.image_tokens(entry)
            plan = PatchPlan.split(
                text=entry.conditioning.context.shape[1],
                image=side.count,
                patches=strategy.pipeline_patches,
                degree=sequence.size,
                ulysses=self._layout.ulysses.size,
                weights=self._layout.sequence_shares,
            )
            tokens = index_of(tuple(plan.image_tokens(sequence.index)), self.device)
            ids = side.ids[tokens]
            row_shards.append(RowShard(first + i, entry.conditioning, sigma, plan, tokens, ids, entry.extras))
        return row_shards

    def _on_all_stages(self, row_shards: list[RowShard], outputs: list[Tensor]) -> Iterator[Tensor]:
        """The last stage's outputs, [1, n, channels] float32 of each row with its tokens in the image's order."""
        sequence = self._layout.sequence
        for i, row in enumerate(row_shards):
            sizes = row.plan.whole.image
            image = (
                outputs[i].contiguous()
                if self._stage.is_last
                else self._stage.empty_output(WorkItem((row,)), row)
            )
            image = broadcast(image, self.stages - 1, self._layout.return_group, self._traffic)
            if sequence.size > 1:
                image = all_gather(image.transpose(0, 1), sizes, sequence, self._traffic).transpose(0, 1)
            order = [token for rank in range(sequence.size) for token in row.plan.image_tokens(rank)]
            yield torch.empty_like(image).index_copy_(1, index_of(tuple(order), self.device), image)


class PipeFusionRun:
    """One flow of patches: keys and values that whole images leave and patches after them recall. Ends with the job."""

    def __init__(self, forward: PipelineForward) -> None:
        self._forward = forward
        self._cache = forward.new_cache()

    def whole(self, rows: list[Rows]) -> list[Tensor]:
        """The forward's own call, whose keys and values are kept."""
        return self._forward.whole(rows, self._cache)

    def by_patches(self, rows: list[Rows], sigmas: Sequence[Tensor], sampling: Sampling) -> bool:
        """Runs a model call for each of `sigmas` (scalars), each patch as soon as the call before gave it back.

        Keys and values of patches that a call has not reached yet are those of the call before. `rows`: an entry per
        prompt, each for all images of the batch; their x tells the shape alone. False when `sampling` stopped it, which
        leaves what is under way uncomputed.
        """
        return self._forward.by_patches(rows, sigmas, sampling, self._cache)
