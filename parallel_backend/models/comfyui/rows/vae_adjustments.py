"""Adjusts some of ComfyUI's VAE networks so that they compute the same on every rank, and through their layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import PlatformError
from .banded import OTHER_VERSION, RowSpan

# Bytes of whole frames that LTX's decoder passes between blocks at once. ComfyUI uses 32 MiB on a 6 GiB card and 128
# on a 24 GiB one. Here it is constant, so that the noise inside layers does not depend on the number of ranks.
_CHUNK_BYTES = 64 * 2**20
# Seed of the noise that a network draws inside its layers. ComfyUI draws new noise for each decode.
_NOISE_SEED = 0


def adjust(network: nn.Module, dtype: torch.dtype) -> None:
    """Changes the network if its class needs it. `dtype`: the dtype in which it computes.

    Raises PlatformError if this version of ComfyUI computes the class in an unknown way.
    """
    change = _ADJUSTMENTS.get(type(network).__module__)
    if change is not None:
        try:
            change(network)
        except AttributeError as error:
            raise PlatformError(f"{OTHER_VERSION}: {error}") from error
    _pad_as_comfyui(network, dtype)


@contextmanager
def reproducible(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Makes a network whose layers draw noise draw the same on each rank and each time, in the `with` block."""
    if not any(map(_injects_noise, network.modules())):
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_NOISE_SEED)
        yield


def _ltx(network: Any) -> None:
    """Makes all ranks use the same chunks of frames, whatever their rows and memory, and noise of whole pictures."""
    network.timestep_conditioning = False  # the latent has its noise already (nodes/job/vae.py)
    decoder = network.decoder
    run_up = decoder.run_up
    if list(inspect.signature(run_up).parameters)[-1:] != ["max_chunk_size"]:
        raise PlatformError(f"{OTHER_VERSION}: it cuts frames otherwise")
    span = decoder.row_span = RowSpan()

    def alike(idx: int, sample_ref: list[Tensor], *args: Any) -> None:
        sizes, local = span.span(sample_ref[0].shape[-2])
        # In proportion to the rows: ComfyUI then computes the same number of chunks on each rank.
        run_up(idx, sample_ref, *args[:-1], _CHUNK_BYTES // sum(sizes) * sizes[local])

    decoder.run_up = alike
    for layer in network.modules():
        if _injects_noise(layer):
            layer._feed_spatial_noise = _noise_of_full_pictures(layer._feed_spatial_noise, span)


def _noise_of_full_pictures(feed: Callable[..., Tensor], span: RowSpan) -> Callable[..., Tensor]:
    """Returns `feed` with noise drawn on the host: with the same seed, different GPUs draw different numbers."""

    def fed(hidden: Tensor, scale: Tensor) -> Tensor:
        sizes, local = span.span(hidden.shape[-2])
        nothing = torch.zeros((), dtype=hidden.dtype).expand(1, 1, 1, sum(sizes), hidden.shape[-1])
        noise = feed(nothing, torch.ones(1, 1, 1, dtype=scale.dtype))  # [1, 1, 1, all rows, W]
        mine = noise[..., sum(sizes[:local]) : sum(sizes[: local + 1]), :]
        return hidden + mine.to(hidden.device) * scale[:, None]

    return fed


def _injects_noise(layer: Any) -> bool:
    return getattr(layer, "inject_noise", False) and hasattr(layer, "_feed_spatial_noise")


def _cogvideo(network: nn.Module) -> None:
    """Makes a single frame go through a convolution's layer: ComfyUI's fast path uses only the layer's weights."""

    def as_several(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
        (x,) = args
        before = layer.time_kernel_size - 1
        if x.shape[2] > 1 or not before or kwargs.get("conv_cache") is not None:
            return None
        return args, kwargs | {"conv_cache": x.expand(-1, -1, before, -1, -1)}

    for layer in network.modules():
        if hasattr(layer, "time_kernel_size"):
            layer.register_forward_pre_hook(as_several, with_kwargs=True)


def _seedvr(network: Any) -> None:
    """Makes convolutions and norms compute a band in one piece: pieces by bytes would differ between ranks."""
    network.set_memory_limit(None, None)


def _pad_as_comfyui(network: nn.Module, dtype: torch.dtype) -> None:
    """Pads with zeros if ComfyUI calls cuDNN directly (for some releases), which ignores a layer's padding mode."""
    import comfy.ops

    if getattr(comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", False) and dtype != torch.float32:
        for layer in network.modules():
            if isinstance(layer, nn.Conv3d):
                layer.padding_mode = "zeros"


def _minimax(network: Any) -> None:
    """Raises AttributeError unless the network has what vae_halves.TiledComfyUIVae uses."""
    _ = network._decode_pixels, network.decoder.patch_size, network.decoder.patch_size_t


_ADJUSTMENTS: dict[str, Callable[[Any], None]] = {
    "comfy.ldm.lightricks.vae.causal_video_autoencoder": _ltx,
    "comfy.ldm.cogvideo.vae": _cogvideo,
    "comfy.ldm.seedvr.vae": _seedvr,
    "comfy.ldm.minimax.vae": _minimax,
}
