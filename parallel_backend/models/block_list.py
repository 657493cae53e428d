"""diffusers' lists of blocks, made so that a forward can pass through only a part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

# A block as diffusers' forward calls it: (text, image) in by name, (text, image) out.
Block = Callable[..., tuple[Tensor, Tensor]]


class BlockList(nn.ModuleList):
    """A forward of diffusers calls what iterating over its lists gives: the blocks, or `route` while there is one."""

    route: Sequence[Block] | None = None

    def __iter__(self) -> Iterator[Block]:
        return super().__iter__() if self.route is None else iter(self.route)
