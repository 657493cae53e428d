"""The demo's text encoder: its words, and a fixed random vector per word plus one per position; nothing is trained."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

COLOURS = ("red", "green", "blue", "yellow", "purple", "black")
SHAPES = ("circle", "square", "triangle", "cross")
# Index 0 pads a text to TOKENS, and an empty prompt is all padding. Index 1 is a word that the demo does not know.
EMPTY, UNKNOWN = 0, 1
WORDS = ("<empty>", "<unknown>", "a", *COLOURS, *SHAPES, "left", "right", "of", "above", "below")
TOKENS = 12

CONTEXT_DIM = 128
POOLED_DIM = 64


def tokenize(text: str) -> list[int]:
    """Returns TOKENS word indices of `text`, padded with EMPTY. Case and punctuation do not matter."""
    words = re.findall(r"[a-z]+", text.lower())[:TOKENS]
    known = [WORDS.index(word) if word in WORDS else UNKNOWN for word in words]
    return known + [EMPTY] * (TOKENS - len(known))


class DemoTextEncoder(nn.Module):
    """Turns word indices into (context [B, T, CONTEXT_DIM], pooled [B, POOLED_DIM]), float32.

    The tables are drawn from a fixed seed, so there is no file to ship: the transformer's first layer learns what the
    vectors mean.
    """

    words: Tensor
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(20_26)
        words = torch.randn(len(WORDS), CONTEXT_DIM, generator=generator)
        places = torch.randn(TOKENS, CONTEXT_DIM, generator=generator)
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("places", places, persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (context, pooled). `tokens`: [B, T <= TOKENS] int64."""
        words, places = self.words[tokens], self.places[: tokens.shape[1]]
        # Words are multiplied by positions, so that a sentence with two words swapped has another sum.
        pooled = (words * places).mean(dim=1)[:, :POOLED_DIM] * tokens.shape[1] ** 0.5
        return words + places, pooled
