"""Closed forms of the bytes that each rank sends under PipeFusion. Tests compare counted bytes to them."""

from __future__ import annotations

from dataclasses import dataclass

from parallel_backend.layout import split_sizes, stage_blocks
from parallel_backend.strategy import ParallelStrategy
from tests.closed_forms.traffic import attention_elements


@dataclass(frozen=True)
class PipelineTraffic:
    """Payload bytes that rank `rank` sends for `prompts` prompts of `batch` images each, with `text` + `image` tokens a
    row. `latent_elements`: of one image; `layers`: of the whole model; `element_size`: bytes of one of its numbers.

    Within a stage, Ulysses and Ring exchange the same as without stages (traffic.py), for whole images and for each
    patch. The first rank of the first stage forwards the input of each model call to the stage's other ranks.
    """

    strategy: ParallelStrategy
    rank: int
    prompts: int
    batch: int
    text: int
    image: int
    hidden: int
    latent_elements: int
    layers: int
    element_size: int = 4

    def whole(self) -> int:
        """Returns the bytes of one model call of whole images: tokens to the next stage, tokens that leave the blocks
        to the stage's other ranks, the answer from the last stage to all others, and rows to the other pipelines."""
        tokens = self._tokens(self.text, self.image)
        hop = (not self._is_last) * self._rows * tokens * self.hidden
        hop += self._rows * (self._attention(self.text, self.image) + self._gathered(self.image))
        answer = self._is_last * (self._stages - 1) * self._rows * self.latent_elements
        gathered = (self.strategy.row_degree - 1) * max(self._row_sizes) * self.latent_elements
        return (hop + answer + gathered) * self.element_size

    def flowing(self) -> int:
        """Returns the bytes of one model call by patches: each patch's tokens to the next stage, its answer back to the
        first stages, which gather all rows, and the input of rank 0's model call to the other first stages."""
        patches = min(self.strategy.pipeline_patches, self.image)
        sizes = list(zip(split_sizes(self.text, patches), split_sizes(self.image, patches), strict=True))
        tokens = sum(self._tokens(text, image) for text, image in sizes)
        hop = (not self._is_last) * self._rows * tokens * self.hidden
        hop += self._rows * sum(self._attention(text, image) for text, image in sizes)
        hop += self._is_last * self._rows * sum(self._gathered(image) for _, image in sizes)
        leads = self._index == 0  # is the first rank of its stage
        back = (leads and self._is_last) * self._own_rows * self.latent_elements
        others = self.strategy.row_degree - 1
        gathered = (leads and self._stage == 0) * others * max(self._row_sizes) * self.latent_elements
        seen = (self.rank == 0) * others + (leads and self._stage == 0) * (self._ranks - 1)
        seen *= self.batch * self.latent_elements
        return (hop + back + gathered) * self.element_size + seen * 4

    def around(self) -> int:
        """Returns the bytes sent once per job whose patches flow: the patch of each element (int64) and the latent."""
        if self.rank:
            return 0
        return (self.strategy.world_size - 1) * (8 + 4 * self.batch) * self.latent_elements

    def _tokens(self, text: int, image: int) -> int:
        """Returns the tokens of this rank's share. A rank without a token of a stream holds one stand-in."""
        return sum(max(1, split_sizes(total, self._ranks)[self._index]) for total in (text, image))

    def _attention(self, text: int, image: int) -> int:
        """Returns the elements of one row in all blocks of the stage. Ring gathers keys and values padded to the
        longest share."""
        split = [split_sizes(total, self._ranks) for total in (text, image)]
        ulysses, ring = self.strategy.ulysses_degree, self.strategy.ring_degree
        plain = self.strategy.replace(ring_degree=1)
        lengths = tuple(map(sum, zip(*split, strict=True)))
        member = self._index // ulysses
        groups = [lengths[i * ulysses : (i + 1) * ulysses] for i in range(ring)]
        own = attention_elements(((groups[member],),), (), self._index % ulysses, plain, self.hidden)
        own += 2 * (ring - 1) * max(map(sum, groups)) * self.hidden // ulysses
        return own * len(stage_blocks(self.layers, (1.0,) * self._stages)[self._stage])

    def _gathered(self, image: int) -> int:
        """Returns the elements of one row that go to the stage's other ranks."""
        return (self._ranks - 1) * max(split_sizes(image, self._ranks)) * self.hidden

    @property
    def _ranks(self) -> int:
        """Number of ranks in a stage, which divide an image's tokens among them."""
        return self.strategy.sequence_degree

    @property
    def _index(self) -> int:
        return self.rank % self._ranks

    @property
    def _stages(self) -> int:
        return self.strategy.pipefusion_degree

    @property
    def _stage(self) -> int:
        return self.rank // self._ranks % self._stages

    @property
    def _is_last(self) -> bool:
        return self._stage == self._stages - 1

    @property
    def _row_sizes(self) -> tuple[int, ...]:
        return split_sizes(self.prompts * self.batch, self.strategy.row_degree)

    @property
    def _own_rows(self) -> int:
        return self._row_sizes[self.rank // (self._stages * self._ranks)]

    @property
    def _rows(self) -> int:
        """Rows that this rank computes. A rank without rows computes the first ones and discards the result."""
        return self._own_rows or max(self._row_sizes)
