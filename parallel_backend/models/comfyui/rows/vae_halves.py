"""A VAE of ComfyUI's own in a rank: the network that ComfyUI builds for these tensors, without its encoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import PlatformError, RequestError
from ....requests import ComfyUISource
from ...banded import RowAttention
from ...tokens.vae_networks import Way, frames_are_a_batch, known
from ..environment import import_comfyui
from .vae_adjustments import adjust, follow, reproducible

# Decodes are counted in as many steps, whatever their length: enough to be interrupted within a second or two.
STEPS = 32
_ANOTHER = "ComfyUI builds another network for these weights than the one that they come from"
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
        bytes: int = 0,
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
        self.bytes = bytes
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

    other_half = ("encoder", "quant_conv", "taesd_encoder")

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

        self._with_tiles(note, latent)
        return found

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

    def _with_tiles(self, made: Callable[[Tensor], Tensor], latent: Tensor) -> Tensor:
        """The network's own decode, in which `made` gives what becomes of each tile."""
        network = self._network
        network._decode_pixels = made
        try:
            return network.decode(latent)
        finally:
            del network._decode_pixels


def load_comfyui_vae(
    tensors: dict[str, Tensor], source: ComfyUISource, device: torch.device, metadata: str = ""
) -> ComfyUIVae:
    """The VAE with these tensors, named as in ComfyUI's own network. Computes in their dtype, on the CPU in float32.

    `metadata`: as of VaeWeights. Raises RequestError for a network that is not shared out.
    """
    told = json.loads(metadata or "{}")
    vae, dtype = build_vae(tensors, source, device, told)
    network = vae.first_stage_model
    found = known(network)
    if network is None or found is None or found.way not in _KINDS:
        raise RequestError(f"ComfyUI builds {type(network).__name__} for this VAE, which is not shared out.")
    follow(network, told)
    size = sum(tensor.nbytes for tensor in tensors.values())
    banded = _KINDS[found.way](network, vae.latent_channels, vae.latent_dim, dtype, device, size)
    check_whole(network, tensors, "decoder")  # ComfyUI warns, and decodes with whatever memory held
    return banded


_KINDS = {Way.BANDS: ComfyUIVae, Way.TILES: TiledComfyUIVae}


def build_vae(
    tensors: dict[str, Tensor], source: ComfyUISource, device: torch.device, told: Mapping[str, Any]
) -> tuple[Any, torch.dtype]:
    """(ComfyUI's VAE of these tensors, in which parts without any hold no numbers; what it computes in). `told`: as of
    VaeWeights.metadata. Raises PlatformError where ComfyUI's loader builds another network than has these tensors, as
    it may where another pack's loader made it."""
    import_comfyui(source, device)
    import comfy.sd

    stored = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    dtype = torch.float32 if device.type == "cpu" else stored
    with _default_dtype(dtype), _parameters_assigned():
        try:
            vae = comfy.sd.VAE(sd=dict(tensors), device=device, dtype=dtype, metadata=told)
        except RuntimeError as error:
            if "state_dict" not in str(error):
                raise
            # torch's last line names a tensor.
            raise PlatformError(f"{_ANOTHER}: {str(error).splitlines()[-1].strip()}") from error
    network = vae.first_stage_model
    left_over = set(tensors)
    if network is not None:
        left_over = left_over.difference(network.state_dict(), dict(network.named_buffers()))
    if left_over:
        raise PlatformError(f"{_ANOTHER}: it has no {min(left_over)}")
    return vae, dtype


def check_whole(network: nn.Module, tensors: dict[str, Tensor], half: str) -> None:
    """Raises RequestError where a parameter of `network` is none of `tensors`."""
    missing = [name for name, _ in network.named_parameters() if name not in tensors]
    if missing:
        raise RequestError(f"the VAE lacks {len(missing)} tensors of its {half}, such as {missing[0]}.")


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
