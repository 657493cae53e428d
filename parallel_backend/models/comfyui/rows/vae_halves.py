"""A VAE of ComfyUI's own in a rank: its network, as ranks share out what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...banded import STEPS, RowAttention
from ...tokens.vae_networks import ENCODER_ALONE, frames_are_a_batch, known
from .vae_adjustments import adjust, reproducible

_ATTENTION = ("optimized_attention", "optimized_vae_attention")


class ComfyUIHalf:
    """base.VaeHalf. `network`: ComfyUI's, to compute in `compute_dtype`; it loses `other_half`, parts by their names,
    and its attention sees all rows."""

    steps = STEPS
    other_half: Sequence[str]

    def __init__(
        self,
        network: nn.Module,
        latent_channels: int,
        latent_dims: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for part in self.other_half:
            if hasattr(network, part):
                delattr(network, part)
        for layer in network.modules():
            for attention in _ATTENTION:
                if hasattr(layer, attention):
                    setattr(layer, attention, RowAttention())
        self._network: Any = network.to(device=device, dtype=compute_dtype).eval().requires_grad_(False)
        self.latent_channels = latent_channels
        self.latent_dims = latent_dims
        self.compute_dtype = compute_dtype
        self.device = device
        self._prepare()

    def _prepare(self) -> None:
        """What this half needs beyond that."""

    @property
    def step_layers(self) -> Sequence[nn.Module]:
        """Convolutions over rows: video networks call them once per few frames."""
        return [
            layer
            for layer in self._network.modules()
            if isinstance(layer, nn.modules.conv._ConvNd) and layer.kernel_size[-2] > 1
        ]


class ComfyUIVae(ComfyUIHalf):
    """base.BandedVae. Its network's decode() computes."""

    other_half = ENCODER_ALONE

    def _prepare(self) -> None:
        adjust(self._network, self.compute_dtype)
        self._found = known(self._network)
        self._frames_are_a_batch = frames_are_a_batch(self._network)
        if self._frames_are_a_batch:
            self.latent_dims = 3

    @property
    def decoder(self) -> nn.Module:
        return self._network

    def layers_per_step(self, latent: Tensor) -> int:
        at_once = self.latent_dims == 2 or (self._found is not None and self._found.at_once)
        return max(1, len(self.step_layers) * (1 if at_once else latent.shape[1]) // self.steps)

    @property
    def min_side(self) -> int:
        """2 where the border is made of the rows and columns beside it."""
        modes = {getattr(layer, "padding_mode", "zeros") for layer in self.step_layers}
        return 2 if "reflect" in modes else 1

    def decode(self, latent: Tensor) -> Tensor:
        network = self._network
        with reproducible(network, self.device):
            if self._frames_are_a_batch:
                return network.decode(latent[0].movedim(1, 0)).movedim(0, 1)[None]
            return network.decode(latent)


class TiledComfyUIVae(ComfyUIVae):
    """base.TiledVae. Its network computes tiles by a method of its own, one call each."""

    def tiles(self, latent: Tensor) -> list[Tensor]:
        found: list[Tensor] = []

        def note(tile: Tensor) -> Tensor:
            found.append(tile)
            return torch.empty(self.tile_shape(tile), dtype=tile.dtype, device="meta")

        self._with_tiles(note, latent, **self._nowhere(latent))
        return found

    def _nowhere(self, latent: Tensor) -> dict[str, Tensor]:
        """The argument for a network that writes its frames into a buffer (ComfyUI 0.33): one without memory."""
        if not hasattr(self._network, "decode_output_shape"):
            return {}
        return {"output_buffer": torch.empty(self._network.decode_output_shape(latent.shape), device="meta")}

    def tile_shape(self, tile: Tensor) -> tuple[int, ...]:
        decoder = self._network.decoder
        frames, height, width = tile.shape[2:]
        side = decoder.patch_size
        return (
            len(tile),
            decoder.out_channels,
            frames * decoder.patch_size_t,
            height * side,
            width * side,
        )

    def compute(self, tile: Tensor) -> Tensor:
        return type(self._network)._decode_pixels(self._network, tile)

    def join(self, latent: Tensor, computed: Iterable[Tensor]) -> Tensor:
        tiles = iter(computed)
        return self._with_tiles(lambda tile: next(tiles).to(tile.device), latent)

    def _with_tiles(self, made: Callable[[Tensor], Tensor], latent: Tensor, **more: Tensor) -> Tensor:
        """The network's own decode, in which `made` gives what becomes of each tile."""
        network = self._network
        network._decode_pixels = made
        try:
            return network.decode(latent, **more)
        finally:
            del network._decode_pixels
