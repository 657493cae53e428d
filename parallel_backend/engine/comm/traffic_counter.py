"""A counter of the collectives that a rank starts and of the payload that it sends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Traffic:
    """Payload bytes that this rank gave to collectives for other ranks, without protocol overhead.

    `collectives`: the number of collectives that it started.
    """

    bytes_sent: int = 0
    collectives: int = 0

    def add(self, elements: int, like: Tensor) -> None:
        """Counts a collective, or a hop of one, that sends `elements` of the dtype of `like` to other ranks."""
        self.collectives += 1
        self.bytes_sent += elements * like.element_size()
