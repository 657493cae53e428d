"""Sizes in which the VAEs of Flux and Stable Diffusion differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VaeSizes:
    """Sizes of a VAE. `channels`: of the latent; `post_quant`: True if a 1x1 convolution comes before the decoder (SD
    has it, Flux does not); `width`: channels of the finest of the four levels (128 in real VAEs)."""

    channels: int = 16
    post_quant: bool = False
    width: int = 32
    resnets: int = 3  # per level
    scale: int = 8  # pixels per latent position and side

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each level, the finest first."""
        return tuple(self.width * factor for factor in (1, 2, 4, 4))
