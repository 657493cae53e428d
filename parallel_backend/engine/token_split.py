"""The split of an image's tokens over ranks: contiguous shares. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import slice_of, split_sizes


@dataclass(frozen=True)
class TokenPlan:
    """The number of text and image tokens that each rank of the sequence axis holds.

    Both are contiguous shares. Surplus text goes to the first ranks and surplus image tokens to the last, so equal
    shares differ by at most one token.
    """

    text: tuple[int, ...]
    image: tuple[int, ...]

    @classmethod
    def split(cls, text: int, image: int, degree: int, weights: tuple[float, ...] = ()) -> TokenPlan:
        """`weights`: how much each rank takes, empty for equal shares."""
        texts = split_sizes(text, degree, weights)
        if not weights:
            return cls(text=texts, image=split_sizes(image, degree)[::-1])
        totals = split_sizes(text + image, degree, weights)
        images = tuple(total - own for total, own in zip(totals, texts, strict=True))
        return cls(text=texts, image=images if min(images) >= 0 else split_sizes(image, degree, weights))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank, text and image together."""
        return tuple(t + n for t, n in zip(self.text, self.image, strict=True))

    @property
    def order(self) -> list[int]:
        """The tokens of text and image, numbered text first, rank by rank as an exchange brings them."""
        found, total = [], sum(self.text)
        for rank in range(len(self.text)):
            text, image = slice_of(self.text, rank), slice_of(self.image, rank)
            found += [*range(text.start, text.stop), *range(total + image.start, total + image.stop)]
        return found
