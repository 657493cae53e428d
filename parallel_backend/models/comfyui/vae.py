"""A VAE of ComfyUI's own in a rank: the network that ComfyUI builds for these tensors, without its encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RequestError
from ...requests import ComfyUISource
from ..vae.base import RowAttention
from ..vae.networks import splits_into_bands
from .environment import import_comfyui

# Decodes are counted in as many steps, whatever their length: enough to be interrupted within a second or two.
STEPS = 32
_ENCODING = ("encoder", "quant_conv")


class ComfyUIVae:
    """base.BandedVae. `network`: ComfyUI's, whose decode() computes; it loses its encoder."""

    steps = STEPS

    def __init__(
        self,
        network: nn.Module,
        latent_channels: int,
        latent_dims: int,
        compute_dtype: torch.dtype,
        device: torch.device,
        bytes: int = 0,
    ) -> None:
        for part in _ENCODING:
            if hasattr(network, part):
                delattr(network, part)
        for layer in network.modules():
            if hasattr(layer, "optimized_attention"):
                layer.optimized_attention = RowAttention()
        self._network = network.to(device=device, dtype=compute_dtype).eval().requires_grad_(False)
        self.latent_channels = latent_channels
        self.latent_dims = latent_dims
        self.compute_dtype = compute_dtype
        self.device = device
        self.bytes = bytes

    @property
    def decoder(self) -> nn.Module:
        return self._network

    @property
    def step_layers(self) -> Sequence[nn.Module]:
        return row_convolutions(self._network)

    def layers_per_step(self, latent: Tensor) -> int:
        frames = latent.shape[1] if self.latent_dims == 3 else 1
        return max(1, len(self.step_layers) * frames // self.steps)

    def decode(self, latent: Tensor) -> Tensor:
        network: Any = self._network
        return network.decode(latent)


def row_convolutions(network: nn.Module) -> list[nn.Module]:
    """By which a decode or encode is counted: video networks call them once per few frames."""
    return [
        layer
        for layer in network.modules()
        if isinstance(layer, nn.modules.conv._ConvNd) and layer.kernel_size[-2] > 1
    ]


def load_comfyui_vae(tensors: dict[str, Tensor], source: ComfyUISource, device: torch.device) -> ComfyUIVae:
    """The VAE with these tensors, named as in ComfyUI's own network. Computes in their dtype, on the CPU in float32.

    Raises RequestError for a network that is not split into bands.
    """
    vae, dtype = build_vae(tensors, source, device)
    network = vae.first_stage_model
    if network is None or not splits_into_bands(network):
        raise RequestError(
            f"ComfyUI builds {type(network).__name__} for this VAE, which is not split into bands."
        )
    size = sum(tensor.nbytes for tensor in tensors.values())
    banded = ComfyUIVae(network, vae.latent_channels, vae.latent_dim, dtype, device, size)
    check_whole(network, tensors, "decoder")  # ComfyUI warns, and decodes with whatever memory held
    return banded


def build_vae(
    tensors: dict[str, Tensor], source: ComfyUISource, device: torch.device
) -> tuple[Any, torch.dtype]:
    """(ComfyUI's VAE of these tensors, in which parts without any hold no numbers; what it computes in)."""
    import_comfyui(source, device)
    import comfy.sd

    stored = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    dtype = torch.float32 if device.type == "cpu" else stored
    with _default_dtype(dtype), _parameters_assigned():
        return comfy.sd.VAE(sd=dict(tensors), device=device, dtype=dtype), dtype


def check_whole(network: nn.Module, tensors: dict[str, Tensor], part: str) -> None:
    """Raises RequestError where a parameter of `network` is none of `tensors`."""
    missing = [name for name, _ in network.named_parameters() if name not in tensors]
    if missing:
        raise RequestError(f"the VAE lacks {len(missing)} tensors of its {part}, such as {missing[0]}.")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, a network is built in `dtype`, so that its memory is only reserved until the weights take its place."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _parameters_assigned() -> Iterator[None]:
    """Inside, ComfyUI's VAE takes tensors as parameters instead of copying them, for each rank, in host memory."""
    import comfy.model_patcher

    if not hasattr(comfy.model_patcher, "CoreModelPatcher"):
        yield  # an older ComfyUI
        return

    class AssigningPatcher(comfy.model_patcher.ModelPatcher):
        def is_dynamic(self) -> bool:
            return True

    stock = comfy.model_patcher.CoreModelPatcher
    comfy.model_patcher.CoreModelPatcher = AssigningPatcher
    try:
        yield
    finally:
        comfy.model_patcher.CoreModelPatcher = stock
