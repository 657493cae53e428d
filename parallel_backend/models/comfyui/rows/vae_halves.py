"""One of ComfyUI's VAEs in a rank: its network, prepared so that ranks can split its work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....errors import RequestError
from ...tokens.vae_networks import DECODER_ALONE, ENCODER_ALONE, frames_are_a_batch, known
from .banded import STEPS, RowAttention
from .vae_adjustments import adjust, reproducible

_ATTENTION = ("optimized_attention", "optimized_vae_attention")


@dataclass(eq=False)
class ComfyUIHalf:
    """A VAE's decoder or encoder on one rank's device. `network`: ComfyUI's; it is cast to `compute_dtype`, loses the
    attributes in `other_half`, and its attention sees all rows. `latent_dims`: 2 for images [B, C, h, w], 3 for videos
    [B, C, t, h, w]; `steps`: number of progress steps of a decode or encode; `unit`: rows of its input per row of the
    latent."""

    network: Any
    latent_channels: int
    latent_dims: int
    compute_dtype: torch.dtype
    device: torch.device
    unit: int = 1

    steps: ClassVar[int] = STEPS
    other_half: ClassVar[Sequence[str]]

    def __post_init__(self) -> None:
        for part in self.other_half:
            if hasattr(self.network, part):
                delattr(self.network, part)
        for layer in self.network.modules():
            for attention in _ATTENTION:
                if hasattr(layer, attention):
                    setattr(layer, attention, RowAttention())
        self.network.to(device=self.device, dtype=self.compute_dtype).eval().requires_grad_(False)

    @property
    def step_layers(self) -> Sequence[nn.Module]:
        """Convolutions over rows, whose calls count as progress. Video networks call each once per few frames."""
        return [
            layer
            for layer in self.network.modules()
            if isinstance(layer, nn.modules.conv._ConvNd) and layer.kernel_size[-2] > 1
        ]


class ComfyUIVae(ComfyUIHalf):
    """A decoder that is exact in bands of rows; it calls the network's decode()."""

    other_half = ENCODER_ALONE

    def __post_init__(self) -> None:
        super().__post_init__()
        adjust(self.network, self.compute_dtype)
        self._found = known(self.network)
        self._frames_are_a_batch = frames_are_a_batch(self.network)
        if self._frames_are_a_batch:
            self.latent_dims = 3

    def layers_per_step(self, latent: Tensor) -> int:
        """Returns the calls of `step_layers` per progress step, for a latent [C, (t,) h, w]."""
        at_once = self.latent_dims == 2 or (self._found is not None and self._found.at_once)
        return max(1, len(self.step_layers) * (1 if at_once else latent.shape[1]) // self.steps)

    def check_input(self, latent: Tensor) -> None:
        """Raises RequestError, worded for users, for a batch that it does not decode."""
        channels, dims = self.latent_channels, self.latent_dims
        # Layers that pad a border with the neighbouring rows and columns need two of them.
        least = 1 + any(getattr(layer, "padding_mode", "zeros") == "reflect" for layer in self.step_layers)
        if latent.ndim != 2 + dims:
            raise RequestError(
                f"the latent has shape {list(latent.shape)}; expected [batch, channels, {'frames, ' * (dims - 2)}"
                "height/8, width/8] for this VAE."
            )
        if latent.shape[1] != channels:
            raise RequestError(
                f"the latent has {latent.shape[1]} channels and the VAE decodes {channels}; it belongs to another "
                "model family."
            )
        if min(latent.shape[-2:]) < least:
            raise RequestError(
                f"the latent is {latent.shape[-1]} x {latent.shape[-2]} positions; this VAE decodes {least} x {least} "
                "and more. Take a larger picture."
            )

    def small_shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of an input whose latent has these rows."""
        frames = (2,) if self.latent_dims == 3 else ()
        return self.latent_channels, *frames, rows, 2

    def __call__(self, latent: Tensor) -> Tensor:
        """Decodes [1, C, rows, w] -> [1, 3, scale * rows, scale * w], or [1, C, t, rows, w] -> [1, 3, T, …, …]."""
        network = self.network
        with reproducible(network, self.device):
            if self._frames_are_a_batch:
                return network.decode(latent[0].movedim(1, 0)).movedim(0, 1)[None]
            return network.decode(latent)


class TiledComfyUIVae(ComfyUIVae):
    """A decoder whose network cuts a latent into tiles itself, and computes each with `_decode_pixels`."""

    def tiles(self, latent: Tensor) -> list[Tensor]:
        """Returns the tiles of a latent [1, C, (t,) h, w] on its device, in the network's order."""
        found: list[Tensor] = []

        def note(tile: Tensor) -> Tensor:
            found.append(tile)
            return torch.empty(self.tile_shape(tile), dtype=tile.dtype, device="meta")

        self._with_tiles(note, latent, **self._nowhere(latent))
        return found

    def _nowhere(self, latent: Tensor) -> dict[str, Tensor]:
        """Returns a buffer without memory for networks that write their frames into one (ComfyUI 0.33)."""
        if not hasattr(self.network, "decode_output_shape"):
            return {}
        return {"output_buffer": torch.empty(self.network.decode_output_shape(latent.shape), device="meta")}

    def tile_shape(self, tile: Tensor) -> tuple[int, ...]:
        """Returns the shape of the network's output for a tile."""
        decoder = self.network.decoder
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
        return type(self.network)._decode_pixels(self.network, tile)

    def join(self, latent: Tensor, computed: Iterable[Tensor]) -> Tensor:
        """Joins the computed tiles, which come in order, to [1, 3, T, H, W] as the network does."""
        tiles = iter(computed)
        return self._with_tiles(lambda tile: next(tiles).to(tile.device), latent)

    def _with_tiles(self, made: Callable[[Tensor], Tensor], latent: Tensor, **more: Tensor) -> Tensor:
        """Runs the network's own decode with `made` in place of the computation of each tile."""
        network = self.network
        network._decode_pixels = made
        try:
            return network.decode(latent, **more)
        finally:
            del network._decode_pixels


@dataclass(eq=False)
class ComfyUIVaeEncoder(ComfyUIHalf):
    """An encoder that is exact in bands of rows; it calls the network's encode(). `unit`: pixels per latent position
    along a side, of which its inputs' sides are multiples; `in_channels`: channels of a pixel; `few_frames`: number of
    frames of a short valid video."""

    in_channels: int = 3

    other_half = DECODER_ALONE

    def __post_init__(self) -> None:
        super().__post_init__()
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
