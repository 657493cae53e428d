"""The demo's image coder: RGB to 16-channel latents at 1/8 size and back; cheap, because it works at latent size."""

from __future__ import annotations

from torch import Tensor, nn

CHANNELS = 16
DOWNSCALE = 8
WIDTH = 128
# Flux's latent format: the model sees (latent - SHIFT) * SCALE (ComfyUI, comfy/latent_formats.py).
SCALE, SHIFT = 0.3611, 0.1159
# Turns latents into colours for previews, by least squares over scenes (tests/models/demo/test_preview.py). For each
# channel of a latent as the model sees it: red, green, blue in -1..1.
RGB_FACTORS = (
    (-0.0766, -0.1078, -0.0456),
    (0.0163, 0.0117, 0.0633),
    (-0.0026, 0.0121, 0.1437),
    (-0.0736, -0.0868, 0.0824),
    (-0.0478, 0.0196, -0.0336),
    (0.0158, -0.1335, 0.0074),
    (-0.0516, -0.0139, -0.0747),
    (0.0181, -0.0168, -0.0018),
    (-0.0017, -0.0453, 0.0481),
    (-0.0417, 0.0661, -0.0299),
    (0.0329, -0.0413, 0.0802),
    (0.0164, -0.0403, 0.0458),
    (-0.0463, 0.0117, -0.0380),
    (0.1368, -0.0355, -0.0342),
    (-0.0011, 0.0364, -0.0143),
    (-0.0571, -0.0809, -0.0410),
)
RGB_BIAS = (0.7714, 0.7291, 0.6781)


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
