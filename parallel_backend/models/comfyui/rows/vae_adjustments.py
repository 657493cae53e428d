"""What single VAE networks of ComfyUI need before ranks decode with them together: alike, and through their layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import PlatformError
from .banded import OTHER_VERSION, RowSpan

# Bytes of whole pictures that LTX's decoder hands from block to block at once. ComfyUI takes 32 MiB on a card of 6 GiB
# and 128 on one of 24; ours do not go by the number of ranks, on which noise within layers would depend.
_CHUNK_BYTES = 64 * 2**20
# Of noise that a network draws within its layers. ComfyUI draws it anew for each decode.
_NOISE_SEED = 0


def adjust(network: nn.Module, dtype: torch.dtype) -> None:
    """Changes this network, which computes in `dtype`, where its class needs it.

    Raises PlatformError for a class that another version of ComfyUI has changed beyond that.
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
    """Inside, a network that draws noise within its layers draws the same on each rank and each time."""
    if not any(map(_injects_noise, network.modules())):
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_NOISE_SEED)
        yield


def _ltx(network: Any) -> None:
    """Frames in as many chunks on each rank, whatever its rows and memory; noise of whole pictures."""
    network.timestep_conditioning = False  # the latent's noise is there already (nodes/job/vae.py)
    decoder = network.decoder
    run_up = decoder.run_up
    if list(inspect.signature(run_up).parameters)[-1:] != ["max_chunk_size"]:
        raise PlatformError(f"{OTHER_VERSION}: it cuts frames otherwise")
    span = decoder.row_span = RowSpan()

    def alike(idx: int, sample_ref: list[Tensor], *args: Any) -> None:
        sizes, local = span.span(sample_ref[0].shape[-2])
        # A share of the bytes that divides by the rows: ComfyUI's division then gives the same on each rank.
        run_up(idx, sample_ref, *args[:-1], _CHUNK_BYTES // sum(sizes) * sizes[local])

    decoder.run_up = alike
    for layer in network.modules():
        if _injects_noise(layer):
            layer._feed_spatial_noise = _noise_of_full_pictures(layer._feed_spatial_noise, span)


def _noise_of_full_pictures(feed: Callable[..., Tensor], span: RowSpan) -> Callable[..., Tensor]:
    """Drawn on the host: from one seed, cards of two kinds draw different numbers."""

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
    """One frame alone goes through a convolution's layer too, not past it by its weights."""

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
    """Convolutions and norms of a band in one piece: pieces of so many bytes would be others on each rank."""
    network.set_memory_limit(None, None)


def _pad_as_comfyui(network: nn.Module, dtype: torch.dtype) -> None:
    """With some releases of cuDNN ComfyUI calls it directly, which pads with zeros whatever a convolution says."""
    import comfy.ops

    if getattr(comfy.ops, "NVIDIA_MEMORY_CONV_BUG_WORKAROUND", False) and dtype != torch.float32:
        for layer in network.modules():
            if isinstance(layer, nn.Conv3d):
                layer.padding_mode = "zeros"


def _minimax(network: Any) -> None:
    """Its tiles are seen at these (vae.TiledComfyUIVae)."""
    _ = network._decode_pixels, network.decoder.patch_size, network.decoder.patch_size_t


_ADJUSTMENTS: dict[str, Callable[[Any], None]] = {
    "comfy.ldm.lightricks.vae.causal_video_autoencoder": _ltx,
    "comfy.ldm.cogvideo.vae": _cogvideo,
    "comfy.ldm.seedvr.vae": _seedvr,
    "comfy.ldm.minimax.vae": _minimax,
}
