"""Sizes that tell one VAE of Flux's and Stable Diffusion's kind from another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VaeSizes:
    """`channels`: of the latent; `post_quant`: a 1x1 convolution before the decoder, which SD has and Flux lacks;
    `width`: channels of the finest of four levels (128 in real ones)."""

    channels: int = 16
    post_quant: bool = False
    width: int = 32
    resnets: int = 3  # of each level
    scale: int = 8  # pixels per latent position and side

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels per level, the finest first."""
        return tuple(self.width * factor for factor in (1, 2, 4, 4))
