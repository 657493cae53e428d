"""Closed forms of what each rank sends under PipeFusion, to check the counted bytes against."""

from __future__ import annotations

from dataclasses import dataclass

from parallel_backend.layout import split_sizes
from parallel_backend.strategy import ParallelStrategy


@dataclass(frozen=True)
class PipelineTraffic:
    """Payload bytes that rank `rank` sends, for `prompts` prompts of `batch` images each, of `text` + `image` tokens a
    row. `latent_elements`: of one image; `element_size`: bytes of a number in the model."""

    strategy: ParallelStrategy
    rank: int
    prompts: int
    batch: int
    text: int
    image: int
    hidden: int
    latent_elements: int
    element_size: int = 4

    def whole(self) -> int:
        """One model call of whole images: tokens to the next stage, the answer from the last stage to all others, and
        rows to the other pipelines."""
        hop = (not self._is_last) * self._rows * (self.text + self.image) * self.hidden
        answer = self._is_last * (self._stages - 1) * self._rows * self.latent_elements
        gathered = (self.strategy.row_degree - 1) * max(self._row_sizes) * self.latent_elements
        return (hop + answer + gathered) * self.element_size

    def flowing(self) -> int:
        """One model call by patches: each patch's tokens onward, its answer back to the first stages, which gather all
        rows, and what the first sampler's model call sees to the other first stages."""
        patches = min(self.strategy.pipeline_patches, self.image)
        # A patch without a token of a stream holds a stand-in.
        tokens = sum(
            max(1, size) for total in (self.text, self.image) for size in split_sizes(total, patches)
        )
        hop = (not self._is_last) * self._rows * tokens * self.hidden
        back = self._is_last * self._own_rows * self.latent_elements
        others = self.strategy.row_degree - 1
        gathered = (self._stage == 0) * others * max(self._row_sizes) * self.latent_elements
        seen = (self.rank == 0) * others * self.batch * self.latent_elements
        return (hop + back + gathered) * self.element_size + seen * 4

    def around(self) -> int:
        """Once in a job whose patches flow: which element belongs to which patch, whether they flow, and the latent."""
        if self.rank:
            return 0
        return (self.strategy.world_size - 1) * (
            8 * self.latent_elements + 1 + 4 * self.batch * self.latent_elements
        )

    @property
    def _stages(self) -> int:
        return self.strategy.pipefusion_degree

    @property
    def _stage(self) -> int:
        return self.rank % self._stages

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    @property
    def _row_sizes(self) -> tuple[int, ...]:
        return split_sizes(self.prompts * self.batch, self.strategy.row_degree)

    @property
    def _own_rows(self) -> int:
        return self._row_sizes[self.rank // self._stages]

    @property
    def _rows(self) -> int:
        """Rows that it computes: where it has none, the first ones for nothing."""
        return self._own_rows or max(self._row_sizes)
