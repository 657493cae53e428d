"""Closed forms of what each rank sends under PipeFusion, to check the counted bytes against."""

from __future__ import annotations

from parallel_backend.engine.patches import PatchPlan
from parallel_backend.layout import split_blocks, split_sizes
from parallel_backend.strategy import ParallelStrategy
from tests.closed_forms.traffic import attention_elements


class PipelineTraffic:
    """Payload bytes that one rank sends, for rows of `text` + `image` tokens each, with equal shares.

    `rows`: of all prompts and images together; `latent_elements`: of one image; `double`, `single`: the model's blocks.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        rank: int,
        *,
        rows: int,
        text: int,
        image: int,
        double: int,
        single: int,
        hidden: int,
        latent_elements: int,
        patch_channels: int = 64,
        element_size: int = 4,
    ) -> None:
        self._strategy, self._hidden = strategy, hidden
        self._element_size, self._patch_channels = element_size, patch_channels
        self._latent_elements = latent_elements
        self._u, self._r = strategy.ulysses_degree, strategy.ring_degree
        self._stages = strategy.pipefusion_degree
        row_and_stage, self._index = divmod(rank, self._u * self._r)
        row, self._stage = divmod(row_and_stage, self._stages)
        self._row_sizes = split_sizes(rows, strategy.row_degree)
        self._rows = self._row_sizes[row]
        chunks = split_blocks(double, single, (1.0,) * self._stages)[self._stage]
        self._layers = sum(map(len, chunks))
        is_last = self._stage == self._stages - 1
        self._sends = (
            len(chunks) - is_last
        )  # messages to a next stage, per item; the very last output goes back
        self._plan = PatchPlan.split(
            text, image, patches=strategy.pipeline_patches, degree=self._u * self._r, ulysses=self._u
        )

    def whole(self) -> int:
        """One model call of whole images: hops, attention, and the output from the last stage to all ranks."""
        plan = self._plan.whole
        attention = attention_elements(
            plan.lengths, plan.lengths, self._index, self._u, self._r, self._hidden
        )
        p2p = self._sends * plan.lengths[self._index] * self._hidden
        output = (self._u * self._r - 1) * max(plan.image) * self._patch_channels
        if self._stage == self._stages - 1:
            output += (self._stages - 1) * plan.image[self._index] * self._patch_channels
        rows = (self._strategy.row_degree - 1) * max(self._row_sizes) * self._latent_elements
        return self._rows * ((self._layers * attention + p2p) * self._element_size + output * 4) + rows * 4

    def flowing(self, first: bool = False) -> int:
        """One model call by patches. `first`: without a whole image before it, so that less is recalled."""
        held = [0] * len(self._plan.whole.lengths)
        total = 0
        for patch in self._plan.patches:
            held = [kept + new for kept, new in zip(held, patch.lengths, strict=True)]
            recalled = tuple(held) if first else self._plan.whole.lengths
            attention = attention_elements(
                patch.lengths, recalled, self._index, self._u, self._r, self._hidden
            )
            p2p = self._sends * patch.lengths[self._index] * self._hidden
            total += self._rows * (self._layers * attention + p2p) * self._element_size
            output = 0
            if self._stage == self._stages - 1:
                output += self._rows * patch.image[self._index]
            if self._stage == 0:
                output += self._rows * (self._u * self._r - 1) * max(patch.image)
                output += (self._strategy.row_degree - 1) * max(self._row_sizes) * sum(patch.image)
            total += output * self._patch_channels * 4
        return total

    def end(self, batch: int) -> int:
        """Once after flowing patches: the latent from the first stage to the others."""
        return (self._stages - 1) * batch * self._latent_elements * 4 if self._stage == 0 else 0
