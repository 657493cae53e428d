"""The encoder of one of ComfyUI's VAEs in a rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....errors import RequestError
from ...tokens.vae_networks import DECODER_ALONE
from .vae_halves import ComfyUIHalf


class ComfyUIVaeEncoder(ComfyUIHalf):
    """An encoder that is exact in bands of rows; it calls the network's encode(). `unit`: pixels per latent position
    along a side, of which its inputs' sides are multiples; `in_channels`: channels of a pixel; `few_frames`: number of
    frames of a short valid video."""

    other_half = DECODER_ALONE

    def __init__(
        self,
        network: nn.Module,
        unit: int,
        in_channels: int,
        latent_channels: int,
        latent_dims: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(network, latent_channels, latent_dims, compute_dtype, device)
        self.unit = unit
        self.in_channels = in_channels
        causal = getattr(self.network.encoder, "refiner_vae", True)
        self.few_frames = 5 if causal else 4  # two latent frames, or one

    def layers_per_step(self, pixels: Tensor) -> int:
        """Returns the calls of `step_layers` per progress step, for pixels [3, (T,) H, W]."""
        encoder = self.network.encoder
        if self.latent_dims == 3:
            # Chunks have two frames (Wan), or twice the frames that become one latent frame (Hunyuan).
            at_once = 2 * getattr(encoder, "time_compress", getattr(encoder, "ffactor_temporal", 1))
            chunks = 1 + (pixels.shape[1] - 1) // at_once
        else:
            chunks = 1
        return max(1, len(self.step_layers) * chunks // self.steps)

    def check_input(self, pixels: Tensor) -> None:
        """Raises RequestError, worded for users, for a batch that it does not encode."""
        channels, dims = self.in_channels, self.latent_dims
        if (
            pixels.ndim != 2 + dims
            or pixels.shape[1] != channels
            or any(n % self.unit for n in pixels.shape[-2:])
        ):
            raise RequestError(
                f"the pixels have shape {list(pixels.shape)}; expected [batch, {channels}, "
                f"{'frames, ' * (dims - 2)}height, width] for this VAE, with sides that divide by {self.unit}."
            )

    def small_shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of an input whose latent has these rows."""
        frames = (self.few_frames,) if self.latent_dims == 3 else ()
        return self.in_channels, *frames, self.unit * rows, 2 * self.unit

    def __call__(self, pixels: Tensor) -> Tensor:
        """Encodes [1, 3, rows, W] -> [1, C, rows / unit, W / unit], or [1, 3, T, rows, W] -> [1, C, t, …, …]."""
        return self.network.encode(pixels)
