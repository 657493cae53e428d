"""Keys and values of the step before in a module's attention, which PipeFusion's patches attend to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

from ...models.base import AttentionCall
from ...models.tokens.regions import Blocks, Guided
from ..tokens.block_tokens import BlockTokens

Attend = Callable[..., Tensor]


class KeptKeys:
    """The newest keys and values of all tokens of one job's rows, of each call of attention in this stage's blocks.

    `counts`: by whose rows, the tokens of the stream that has the image's."""

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self._held: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.masked = False  # whether attention had a mask, whose form for a patch nobody knows

    @property
    def among(self) -> int:
        """Tokens of the longest stream that has the image's, where those of the prompts differ, having text too; else
        0."""
        counts = set(self.counts.values())
        return max(counts) if len(counts) > 1 else 0

    def attention(self, place: Hashable, kind: Blocks, tokens: BlockTokens | None) -> AttentionCall:
        """Of one call of a block. `place`: whose rows in which block; `tokens`: of a patch, whose keys and values
        replace the older ones; None for whole images, whose keys and values are all kept."""
        streams: Iterator[Any] = iter(kind.attends)
        calls = 0

        def attend(
            original: Attend,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *args: Any,
            skip_reshape: bool = False,
            **others: Any,
        ) -> Tensor:
            nonlocal calls
            attends = next(streams, None)
            stream = attends[1] if isinstance(attends, tuple) else attends
            if isinstance(stream, Guided):  # with guides there is a mask
                stream = stream.stream
            if stream is not None:
                self.masked |= any(isinstance(arg, Tensor) for arg in (*args, others.get("mask")))
                k, v = self._recall((place, calls), k, v, 2 if skip_reshape else 1, stream, tokens)
                calls += 1
            return original(q, k, v, *args, skip_reshape=skip_reshape, **others)

        return attend

    def _recall(
        self, place: Hashable, k: Tensor, v: Tensor, dim: int, stream: str, tokens: BlockTokens | None
    ) -> tuple[Tensor, Tensor]:
        """What to attend to. `dim`: of the tokens."""
        if tokens is None:
            self._held[place] = k.clone(), v.clone()  # they may be parts of something larger
            return k, v
        held = self._held[place]
        for whole, new in zip(held, (k, v), strict=True):
            tokens.put(new, stream, dim, whole)
        return held
