"""PipeFusion's patches of an image, each shared out over the sequence axis. Pure functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import slice_of, split_sizes
from .token_split import TokenPlan


@dataclass(frozen=True)
class PatchPlan:
    """The patches of one image: contiguous runs of its tokens. The text goes with the first.

    A rank of the sequence axis holds its share of every patch, also while whole images are computed, so that keys and
    values of a token are always made by the same rank. `ulysses`: ranks of that axis that exchange heads; the keys and
    values of such a group are what one member of a ring holds.
    """

    patches: tuple[TokenPlan, ...]
    ulysses: int = 1

    @classmethod
    def split(
        cls,
        text: int,
        image: int,
        *,
        patches: int,
        degree: int,
        ulysses: int,
        weights: tuple[float, ...] = (),
    ) -> PatchPlan:
        """At most one patch per image token. `weights`: how much each rank takes, empty for equal shares."""
        sizes = split_sizes(image, min(patches, image))
        texts = (text, *[0] * (len(sizes) - 1))
        return cls(
            tuple(TokenPlan.split(t, n, degree, weights) for t, n in zip(texts, sizes, strict=True)), ulysses
        )

    @property
    def whole(self) -> TokenPlan:
        """All patches as one."""
        images = zip(*(patch.image for patch in self.patches), strict=True)
        return TokenPlan(self.patches[0].text, tuple(map(sum, images)))

    def image_span(self, patch: int) -> slice:
        """Image tokens of a patch."""
        begin = sum(sum(p.image) for p in self.patches[:patch])
        return slice(begin, begin + sum(self.patches[patch].image))

    def image_tokens(self, rank: int) -> list[int]:
        """Image tokens of a rank of the sequence axis, patch after patch."""
        found: list[int] = []
        for i, patch in enumerate(self.patches):
            begin = self.image_span(i).start + sum(patch.image[:rank])
            found += range(begin, begin + patch.image[rank])
        return found

    @property
    def whole_order(self) -> list[int]:
        """The tokens of text and image, numbered text first, rank by rank as an exchange of the whole image brings
        them."""
        found, total, whole = [], sum(self.whole.text), self.whole
        for rank in range(len(whole.text)):
            text = slice_of(whole.text, rank)
            found += [*range(text.start, text.stop), *(total + token for token in self.image_tokens(rank))]
        return found

    def held(self, member: int) -> tuple[int, ...]:
        """Keys of each patch that a ring member holds, the text's with the first."""
        return tuple(sum(patch.lengths[r] for r in self._group(member)) for patch in self.patches)

    def order(self, member: int) -> list[int]:
        """The places of the keys that a ring member holds among those of one exchange of the whole image.

        An exchange brings them rank by rank, [text, image]; they are held patch by patch, within it rank by rank.
        """
        starts, begin = {}, 0
        for rank in self._group(member):
            starts[rank] = begin
            begin += self.whole.lengths[rank]
        found: list[int] = []
        for i, patch in enumerate(self.patches):
            for rank in self._group(member):
                text = self.whole.text[rank]
                if i == 0:
                    found += range(starts[rank], starts[rank] + text)
                first = starts[rank] + text + sum(p.image[rank] for p in self.patches[:i])
                found += range(first, first + patch.image[rank])
        return found

    def _group(self, member: int) -> range:
        return range(member * self.ulysses, (member + 1) * self.ulysses)


@functools.lru_cache(maxsize=64)
def index_of(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers of tokens as an index. Kept, since to copy it there the host waits for the device."""
    with torch.inference_mode(False):  # sharded weights are computed with outside of it
        return torch.tensor(numbers, dtype=torch.long, device=device)
