"""diffusers' lists of blocks, made so that a forward can pass through only a part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

# A block as diffusers' forward calls it: (text, image) in by name, (text, image) out.
Block = Callable[..., tuple[Tensor, Tensor]]


class BlockList(nn.ModuleList):
    """Blocks of which iterating, all that diffusers' forwards do, gives those that replace them for a call."""

    _replacement: Sequence[Block] | None = None

    def __iter__(self) -> Iterator[nn.Module]:
        if self._replacement is None:
            return super().__iter__()
        return iter(self._replacement)  # type: ignore[arg-type]  # the forward only calls them

    @contextmanager
    def replaced_by(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Inside, iterating gives `blocks`."""
        self._replacement = blocks
        try:
            yield
        finally:
            self._replacement = None
