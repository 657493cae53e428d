"""A text encoder of a few layers that can be slow or fail."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class ToyLayer(nn.Module):
    """A layer that returns (hidden, {"total": sum of all layers' hidden so far}, its number). `seconds`: duration of a
    call; `fails`: True to raise ValueError."""

    def __init__(self, number: int, width: int, seconds: float, fails: bool) -> None:
        super().__init__()
        self.number, self.seconds, self.fails = number, seconds, fails
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor, total: Tensor | None) -> tuple[Tensor, dict[str, Tensor | None], int]:
        time.sleep(self.seconds)
        if self.fails:
            raise ValueError("this layer cannot")
        hidden = torch.tanh(self.linear(hidden))
        return hidden, {"total": hidden if total is None else total + hidden}, self.number


class ToyEncoder(nn.Module):
    """Encodes token numbers [B, N] into (hidden [B, N, width], None, {"total": sum of the layers' hidden})."""

    def __init__(self, layers: int = 5, width: int = 8, seconds: float = 0.0, fails: int = -1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            ToyLayer(number, width, seconds, number == fails) for number in range(layers)
        )

    def encode(self, tokens: Tensor) -> tuple[Tensor, None, dict[str, Tensor | None]]:
        hidden, totals = self.embedding(tokens), {"total": None}
        for number, layer in enumerate(self.layers):
            hidden, totals, found = layer(hidden, totals["total"])
            assert found == number
        return hidden, None, totals
