"""Predicts the memory of each rank from the sizes of a model's file, a strategy and a job. Pure functions.

ModelFile gives the weights and the peak of a model call. Latents, prompts, PipeFusion's messages and the previous
step's keys and values are added here. benchmarks/memory.py compares the prediction with what ranks really use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...layout import RankCoordinates, split_sizes
from ...models.dtypes import ITEMSIZE, Dtypes
from ...models.footprint import FP32, TokenLoad
from ...models.model_file import ModelFile
from ...strategy import ParallelStrategy
from .rank_memory import CPU_BASE_BYTES, RankMemory, gpu_base_bytes
from .workload import Job


@functools.lru_cache(maxsize=256)  # the candidates of one prompt: its next run asks for them again
def predict_memory(job: Job, strategy: ParallelStrategy, *, on_cpu: bool = False) -> tuple[RankMemory, ...]:
    """Predicts the memory of every rank of `strategy`, in rank order."""
    file = job.model.file
    dtypes = Dtypes.of(job.model.weight_dtype, file.dtype, on_cpu)
    return tuple(
        _Rank(file, dtypes, strategy, job, rank, on_cpu).predict() for rank in range(strategy.world_size)
    )


@dataclass(frozen=True)
class _Run:
    """A model call through `blocks`. `beside`: other bytes in use: PipeFusion's messages, keys and values."""

    call: TokenLoad
    blocks: range
    beside: int
    name: str


@dataclass(frozen=True)
class _Rank:
    """One rank of a job under a strategy."""

    file: ModelFile
    dtypes: Dtypes
    strategy: ParallelStrategy
    job: Job
    rank: int
    on_cpu: bool

    @property
    def place(self) -> RankCoordinates:
        return RankCoordinates.of(self.strategy, self.rank)

    @property
    def rows(self) -> int:
        return split_sizes(self.job.rows, self.strategy.row_degree)[self.place.row(self.strategy)]

    def predict(self) -> RankMemory:
        weights = self.file.held_weights(self.dtypes, self.strategy, self.rank, on_cpu=self.on_cpu)
        around = self._latents()
        best = RankMemory(self.rank, weights.around.gathered, 0, around, 0)
        parts = {part.block: part for part in weights.parts}
        kind_of = [kind for kind, like in enumerate(self.file.family.blocks) for _ in range(like.count)]
        for run in self._runs():
            # Blocks of one kind differ only in the dtypes of their layers.
            kinds = {
                (kind_of[block], parts[block].cast, parts[block].gathered): block
                for block in reversed(run.blocks)
            }
            for block in kinds.values():
                for moment in self.file.moments(block, run.call, parts[block].cast):
                    found = RankMemory(
                        self.rank,
                        weights=weights.in_flight(parts[block], self.on_cpu),
                        activations=moment.alive,
                        buffers=around + moment.exchanged + run.beside,
                        base=0,
                        fullest=f"{moment.where}, {run.name}",
                    )
                    best = max(best, found, key=lambda memory: memory.private_bytes)
        private, host = (0, weights.private) if weights.offloaded else (weights.private, 0)
        return replace(
            best,
            weights=best.weights + private + self.job.patch_bytes,
            base=CPU_BASE_BYTES if self.on_cpu else gpu_base_bytes(self.strategy, self.rank),
            mapped=weights.mapped,
            host=host,
        )

    def _runs(self) -> Iterator[_Run]:
        if not self.rows:
            return
        if self.strategy.pipefusion_degree > 1:
            yield from self._pipeline_runs()
        else:
            call = self._call(self.rows, self.job.text_tokens, self.job.image_tokens)
            # The step cache stores two residuals of the image: the first block's and that of all others. While the
            # others compute, their input takes the place of the second residual.
            cached = 2 * call.width(call.image) if self.job.step_cache else 0
            yield _Run(call, range(self.file.family.block_count), cached, "whole images")

    def _call(self, rows: int, text: int, image: int, keys: tuple[int, ...] = ()) -> TokenLoad:
        """Returns the load of a row's `text` + `image` tokens on the sequence axis. `keys`: the tokens that each ring
        member brings, if different from those."""
        strategy, place = self.strategy, self.place
        ulysses = strategy.ulysses_degree
        totals = place.split_tokens(strategy, text + image)
        texts = place.split_tokens(strategy, text)
        members = tuple(sum(totals[i : i + ulysses]) for i in range(0, len(totals), ulysses))
        index = place.ring * ulysses + place.ulysses
        return TokenLoad(
            rows=rows,
            text=texts[index],
            image=totals[index] - texts[index],
            hidden=self.file.family.hidden,
            element=ITEMSIZE[self.dtypes.compute],
            group=members[place.ring],
            keys=keys or members,
            ulysses=ulysses,
            tensor=strategy.tensor_degree,
            has_scores=self.on_cpu,
        )

    def _pipeline_runs(self) -> Iterator[_Run]:
        """Yields the runs of a pipeline: whole images during warm-up, patches after it."""
        strategy, job = self.strategy, self.job
        blocks = self.place.blocks(strategy, self.file.shape.blocks)
        full_call = self._call(self.rows, job.text_tokens, job.image_tokens)
        every = sum(full_call.keys)
        # A layer's keys and values of every token, for this rank's share of the heads; a ring's are gathered here.
        layer = 2 * full_call.width(every) // strategy.ulysses_degree
        gathered = layer * (strategy.ring_degree > 1)
        flows = strategy.warmup_steps < job.steps
        if flows:
            patches = min(strategy.pipeline_patches, job.image_tokens)
            text, image = (-(-total // patches) for total in (job.text_tokens, job.image_tokens))
            call = self._call(self.rows, text, image, keys=(every,))
            messages = self._most_messages(patches) * call.width(call.tokens)
            output = self.rows * full_call.image * self.file.token_channels * FP32  # the model's output
            at_an_end = self.place.stage in (0, strategy.pipefusion_degree - 1)
            embedded = full_call.width(full_call.tokens)  # the whole image, which patches are cut from
            beside = layer * len(blocks) + output * at_an_end + gathered // patches + messages + embedded
            yield _Run(call, blocks, beside, "patches")
        if strategy.warmup_steps > 0:
            # The last whole image leaves its keys and values for the patches. The tokens from the previous stage are in
            # memory at the same time as the module's own tokens at that place.
            beside = (
                layer * len(blocks) * flows
                + gathered
                + full_call.width(full_call.tokens) * (self.place.stage > 0)
            )
            yield _Run(replace(full_call, keys=(every,)), blocks, beside, "whole images")

    def _most_messages(self, patches: int) -> int:
        """Returns the most messages that a stage holds besides the one that it works on (engine/stages/p2p.py): those
        sent in this round and the one before, the last output, and the next input on its way."""
        is_first, is_last = self.place.stage == 0, self.place.stage == self.strategy.pipefusion_degree - 1
        return max(
            (not is_last) * (patches + n) + (n > 0) + (not is_first and n + 1 < patches)
            for n in range(patches)
        )

    def _latents(self) -> int:
        """Returns the bytes of latents and prompts during a model call.

        They are the sampler's latent and its last denoised one, the rows' latents joined and packed, and the prompts;
        on a GPU also the noise and the input latent. One row's prompts on the CPU stay in the request's memory.
        """
        rows = self.rows
        height, width = self.job.latent_size
        one = self.job.frames * height * width * self.file.inputs.channels_out * FP32
        latent = one * self.job.batch
        joined = rows > 1
        latents = 2 * latent + rows * one * (1 + joined)
        prompts = rows * self.job.text_tokens * self.file.inputs.context * FP32
        return latents + (prompts if joined or not self.on_cpu else 0) + (0 if self.on_cpu else 2 * latent)
