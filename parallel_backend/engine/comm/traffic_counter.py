"""Counts the collectives that a rank begins, and the payload that leaves it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Traffic:
    """Payload bytes that left this rank: what it handed to collectives for other ranks, not counting protocol.

    `collectives`: how many it began.
    """

    bytes_sent: int = 0
    collectives: int = 0

    def add(self, elements: int, like: Tensor) -> None:
        """A collective, or a hop of one, that begins now and takes `elements` of the dtype of `like` to other ranks."""
        self.collectives += 1
        self.bytes_sent += elements * like.element_size()
