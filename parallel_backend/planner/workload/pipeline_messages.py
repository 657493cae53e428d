"""The messages between the stages of a pipeline that a rank holds while it computes. Pure functions.

Follows engine/stages/stages.py and p2p.py step by step: what they ask for, keep and free decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """While item `item` of a turn is taken through chunk `chunk`: bytes of the messages held beside the one that this
    starts from."""

    chunk: int
    item: int
    held: int


@dataclass(frozen=True)
class PipelineRound:
    """A turn on a stage with `chunks` chunks of blocks: all items through the first, then all through the second."""

    chunks: int
    is_first: bool
    is_last: bool

    def moments(self, messages: Sequence[int], before: Sequence[int] = ()) -> Iterator[Messages]:
        """Each computation of a turn, in order.

        `messages`: bytes of each item's message between two chunks; `before`: of the turn before, which are kept until
        this one ends. What the very last chunk gives is no message.
        """
        sent = sum(before) * (self.chunks - self.is_last)
        order = [(chunk, item) for chunk in range(self.chunks) for item in range(len(messages))]
        for n, (chunk, item) in enumerate(order):
            output_before = messages[order[n - 1][1]] if n else 0  # held until this one's is there
            asked = sum(messages[i] for i in self._asked(order, n))
            yield Messages(chunk, item, sent + output_before + asked)
            if not (self.is_last and chunk == self.chunks - 1):
                sent += messages[item]

    def _asked(self, order: Sequence[tuple[int, int]], n: int) -> list[int]:
        """Items whose messages were asked for and not taken yet: the next one's; on the first stage all at once."""
        if self.is_first:
            return [item for _, item in order[n + 1 :]] if order[n][0] == 1 else []
        return [item for _, item in order[n + 1 : n + 2]]
