"""Counts the payload that leaves a rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Traffic:
    """Payload bytes that left this rank: what it handed to collectives for other ranks, not counting protocol."""

    bytes_sent: int = 0

    def add(self, elements: int, like: Tensor) -> None:
        self.bytes_sent += elements * like.element_size()
