"""How rows and tokens are shared out over ranks: contiguous, as even as whole numbers allow. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass


def share(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` contiguous shares of `total`; they differ by at most one, the first are the larger."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def span(sizes: tuple[int, ...], i: int) -> slice:
    """The range of share `i`."""
    begin = sum(sizes[:i])
    return slice(begin, begin + sizes[i])


@dataclass(frozen=True)
class TokenPlan:
    """Which text and image tokens each rank of the sequence axis holds, by count. Both are contiguous shares.

    Surplus text goes to the first ranks and surplus image tokens to the last, so totals differ by at most one.
    """

    text: tuple[int, ...]
    image: tuple[int, ...]

    @classmethod
    def split(cls, text: int, image: int, degree: int) -> TokenPlan:
        return cls(text=share(text, degree), image=share(image, degree)[::-1])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank, text and image together."""
        return tuple(t + n for t, n in zip(self.text, self.image, strict=True))
