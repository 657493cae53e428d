"""The demo's image coder: RGB to 16-channel latents at 1/8 size and back; cheap, because it works at latent size."""

from __future__ import annotations

from torch import Tensor, nn

CHANNELS = 16
DOWNSCALE = 8
WIDTH = 128
# Flux's latent format: the model sees (latent - SHIFT) * SCALE (ComfyUI, comfy/latent_formats.py).
SCALE, SHIFT = 0.3611, 0.1159


class DemoImageCoder(nn.Module):
    """An autoencoder. `encode`: [B, 3, H, W] in -1..1 -> [B, 16, H/8, W/8]; `decode` is the inverse. H and W must be
    multiples of 8. Latents have unit variance inside; outside they have the scale and shift of Flux's own VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, WIDTH, DOWNSCALE, stride=DOWNSCALE), nn.GELU(), nn.Conv2d(WIDTH, CHANNELS, 1)
        )
        # Gives the latents of training zero mean and unit variance per channel.
        self.norm = nn.BatchNorm2d(CHANNELS, affine=False, momentum=0.02)
        self.decoder = nn.Sequential(
            nn.Conv2d(CHANNELS, WIDTH, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(WIDTH, 3 * DOWNSCALE**2, 1),
            nn.PixelShuffle(DOWNSCALE),
        )

    def encode(self, image: Tensor) -> Tensor:
        return self.norm(self.encoder(image)) / SCALE + SHIFT

    def decode(self, latent: Tensor) -> Tensor:
        return self.decoder((latent - SHIFT) * SCALE)
