"""The arithmetic of one model call (FLOPs, weights, tokens) in closed form. A multiply-add counts as two FLOPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCounts:
    """A group of `count` equal transformer blocks.

    `image_weights`, `text_weights`: multiply-adds per image / text token in the linear layers of one block.
    `attends`: "joint" (image and text tokens together), "image" (image tokens only; text through cross-attention).
    `reduces`: all-reduces that tensor parallelism needs in one block.
    """

    count: int
    image_weights: float
    text_weights: float
    attends: str = "joint"
    reduces: int = 2


@dataclass(frozen=True)
class Family:
    """A model family. `spatial`, `temporal`: pixels along a side of a token, and frames in it; `latent_pixels`: image
    pixels along a side of a latent cell; `parameters`: number of parameters of the denoiser.

    `image_flop`, `image_attention`: for UNets, FLOPs outside of attention and in it for one 1024 x 1024 image.
    """

    name: str
    hidden: int
    heads: int
    blocks: tuple[BlockCounts, ...]
    parameters: float
    text_tokens: int
    spatial: int = 16
    temporal: int = 1
    latent_pixels: int = 8
    image_flop: float = 0.0
    image_attention: float = 0.0

    @property
    def is_transformer(self) -> bool:
        return self.image_flop == 0.0

    @property
    def block_count(self) -> int:
        return sum(b.count for b in self.blocks)

    def image_tokens(self, width: int, height: int, frames: int = 1) -> int:
        """Returns the image tokens of one row. Sides are rounded up; a causal encoder keeps the first frame alone."""
        across, down = -(-width // self.spatial), -(-height // self.spatial)
        return across * down * ((frames - 1) // self.temporal + 1)

    def linear_flop(self, image: int, text: int) -> float:
        """Returns the FLOPs of the linear layers in one call for one row of `image` + `text` tokens."""
        return sum(2.0 * b.count * (b.image_weights * image + b.text_weights * text) for b in self.blocks)

    def attention_flop(self, image: int, text: int) -> float:
        """Returns the FLOPs of attention for one row: queries x keys plus weights x values, 4 * tokens² * hidden."""
        total = 0.0
        for b in self.blocks:
            if b.attends == "joint":
                total += 4.0 * b.count * self.hidden * (image + text) ** 2
            else:
                total += 4.0 * b.count * self.hidden * (image * image + image * text)
        return total
