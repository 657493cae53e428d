"""The encoder of a VAE of ComfyUI's own in a rank: the network that ComfyUI builds for these tensors, without its
decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....errors import RequestError
from ....requests import ComfyUISource
from ...tokens.vae_networks import encodes_in_bands
from .vae_halves import ComfyUIHalf, build_vae, check_whole


class ComfyUIVaeEncoder(ComfyUIHalf):
    """base.BandedVaeEncoder. Its network's encode() computes."""

    other_half = ("decoder", "post_quant_conv", "conv2")

    def __init__(
        self,
        network: nn.Module,
        scale: int,
        in_channels: int,
        latent_channels: int,
        latent_dims: int,
        compute_dtype: torch.dtype,
        device: torch.device,
        bytes: int = 0,
    ) -> None:
        super().__init__(network, latent_channels, latent_dims, compute_dtype, device, bytes)
        self.scale = scale
        self.in_channels = in_channels
        causal = getattr(self._network.encoder, "refiner_vae", True)
        self.few_frames = 5 if causal else 4  # two of the latent's, and one

    @property
    def encoder(self) -> nn.Module:
        return self._network

    def layers_per_step(self, pixels: Tensor) -> int:
        """`pixels` [3, (T,) H, W]. Frames are computed in twos (Wan), or in twice as many as become one (Hunyuan)."""
        encoder = self._network.encoder
        if self.latent_dims == 3:
            at_once = 2 * getattr(encoder, "time_compress", getattr(encoder, "ffactor_temporal", 1))
            chunks = 1 + (pixels.shape[1] - 1) // at_once
        else:
            chunks = 1
        return max(1, len(self.step_layers) * chunks // self.steps)

    def encode(self, pixels: Tensor) -> Tensor:
        return self._network.encode(pixels)


def load_comfyui_encoder(
    tensors: dict[str, Tensor], source: ComfyUISource, device: torch.device
) -> ComfyUIVaeEncoder:
    """The encoder with these tensors, as load_comfyui_vae."""
    vae, dtype = build_vae(tensors, source, device, told={})
    network = vae.first_stage_model
    if network is None or not encodes_in_bands(network):
        raise RequestError(
            f"ComfyUI builds {type(network).__name__} for this VAE, whose encoder is not split into bands."
        )
    banded = ComfyUIVaeEncoder(
        network,
        scale=vae.spacial_compression_encode(),
        in_channels=vae.output_channels,
        latent_channels=vae.latent_channels,
        latent_dims=vae.latent_dim,
        compute_dtype=dtype,
        device=device,
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )
    check_whole(network, tensors, "encoder")
    return banded
