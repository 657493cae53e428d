"""The encoder of one of ComfyUI's VAEs in a rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...tokens.vae_networks import DECODER_ALONE
from .vae_halves import ComfyUIHalf


class ComfyUIVaeEncoder(ComfyUIHalf):
    """An encoder that is exact in bands of rows; it calls the network's encode(). `scale`: pixels per latent position
    along a side; `in_channels`: channels of a pixel; `few_frames`: number of frames of a short valid video."""

    other_half = DECODER_ALONE

    def __init__(
        self,
        network: nn.Module,
        scale: int,
        in_channels: int,
        latent_channels: int,
        latent_dims: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(network, latent_channels, latent_dims, compute_dtype, device)
        self.scale = scale
        self.in_channels = in_channels
        causal = getattr(self._network.encoder, "refiner_vae", True)
        self.few_frames = 5 if causal else 4  # two latent frames, or one

    @property
    def encoder(self) -> nn.Module:
        return self._network

    def layers_per_step(self, pixels: Tensor) -> int:
        """Returns the calls of `step_layers` per progress step, for pixels [3, (T,) H, W]."""
        encoder = self._network.encoder
        if self.latent_dims == 3:
            # Chunks have two frames (Wan), or twice the frames that become one latent frame (Hunyuan).
            at_once = 2 * getattr(encoder, "time_compress", getattr(encoder, "ffactor_temporal", 1))
            chunks = 1 + (pixels.shape[1] - 1) // at_once
        else:
            chunks = 1
        return max(1, len(self.step_layers) * chunks // self.steps)

    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes [1, 3, rows, W] -> [1, C, rows / scale, W / scale], or [1, 3, T, rows, W] -> [1, C, t, …, …]."""
        return self._network.encode(pixels)
