"""The VAE that a rank holds beside its model, and the latents it decodes with it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import RequestError
from ..requests import LoadInfo
from ..wire.decode_messages import RankDecode, check_decode
from ..wire.payloads import Tensors
from ..wire.protocol import Decode, LoadVae
from .errors import PeerFailed
from .step_boundary import StepBoundary

if TYPE_CHECKING:
    from ..engine.groups import World
    from ..engine.vae.decoder import BandedDecoder, RankGroups
    from ..engine.vae.tiles import TiledDecoder
    from ..models.vae.base import BandedVae, TiledVae


class VaeWorker:
    """One VAE at most, under the identity it was sent with. `all_good(error)`: whether no rank has one; collective."""

    def __init__(self, world: World, all_good: Callable[[Exception | None], bool]) -> None:
        self._world = world
        self._all_good = all_good
        self._identity = ""
        self._decoder: BandedDecoder | TiledDecoder | None = None
        self._groups: RankGroups = {}

    def load(self, message: LoadVae, tensors: Tensors) -> LoadInfo:
        """Holds this VAE in place of another, on every rank or on none."""
        begun = time.perf_counter()
        self.drop()
        model: BandedVae | TiledVae | None = None
        error: Exception | None = None
        try:
            model = _load(message, tensors, self._world.device)
            self._decoder = _decoder(model, self._world, self._groups)
        except Exception as failure:
            error = failure
        is_held = self._all_good(error)
        if is_held and self._decoder is not None and message.comfyui is not None:
            try:  # all ranks meet in it, so none may have failed before
                self._decoder.check()
            except Exception as failure:
                error = failure
            is_held = self._all_good(error)
        if not is_held or model is None:
            model = None
            self.drop()
            raise error or PeerFailed("another rank could not hold the VAE")
        self._identity = message.identity
        return LoadInfo(
            seconds=time.perf_counter() - begun,
            bytes=model.bytes,
            cached=False,
            dtype=_name(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())),
            compute_dtype=_name(model.compute_dtype),
        )

    def steps(self, tensors: Tensors) -> int:
        """Step boundaries that decoding these tensors passes."""
        steps = 0 if self._decoder is None else self._decoder.vae.steps
        return steps * len(tensors.get("latent", ()))

    def decode(
        self, message: Decode, tensors: Tensors, on_step: StepBoundary
    ) -> tuple[Tensors | None, RankDecode]:
        """{"image": [B, H, W, 3]} on rank 0, frames of a video as images; one latent after the other, so that a batch
        needs no more memory."""
        begun = time.perf_counter()
        decoder, latent = self._checked(message, tensors)
        device = self._world.device
        sent, before = decoder.bytes_sent, _start_peak(device)
        step = 0

        def after_layers() -> None:
            nonlocal step
            on_step(step, latent)
            step += 1

        images: Tensor | None = None
        for i, one in enumerate(latent):
            frames = decoder(one, message.shares, after_layers)
            if frames is None:
                continue
            if images is None:
                images = torch.empty(len(latent), *frames.shape, dtype=frames.dtype)
            images[i] = frames
        on_step.finish()
        run = RankDecode(
            seconds=time.perf_counter() - begun,
            rows=decoder.parts(latent[0], message.shares)[self._world.rank],
            bytes_sent=decoder.bytes_sent - sent,
            peak_bytes=_peak(device) - before,
            compute_dtype=_name(decoder.vae.compute_dtype),
        )
        _give_back(device)  # the sampler's next step may need what the largest layers took
        return None if images is None else {"image": images.flatten(0, 1)}, run

    @property
    def is_held(self) -> bool:
        return self._decoder is not None

    def drop(self) -> None:
        self._decoder = None
        gc.collect()  # a decoder and the hooks on its layers refer to each other
        _give_back(self._world.device)

    def _checked(self, message: Decode, tensors: Tensors) -> tuple[BandedDecoder | TiledDecoder, Tensor]:
        """The decoder and its latent [B, C, (t,) h, w], checked alike on every rank before any of them begins."""
        if self._decoder is None or self._identity != message.identity:
            raise RequestError("the ranks do not hold the VAE of this request.")
        if set(tensors) != {"latent"}:
            raise RequestError(f"a latent was expected, not the tensors {', '.join(sorted(tensors))}.")
        latent = tensors["latent"]
        check_decode(latent, message.shares, self._world.world_size)
        channels, dims = self._decoder.vae.latent_channels, self._decoder.vae.latent_dims
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
        least = self._decoder.vae.min_side
        if min(latent.shape[-2:]) < least:
            raise RequestError(
                f"the latent is {latent.shape[-1]} x {latent.shape[-2]} positions; this VAE decodes {least} x {least} "
                "and more. Take a larger picture."
            )
        return self._decoder, latent


def _decoder(model: BandedVae | TiledVae, world: World, groups: RankGroups) -> BandedDecoder | TiledDecoder:
    from ..models.vae.base import TiledVae

    if isinstance(model, TiledVae):
        from ..engine.vae.tiles import TiledDecoder

        return TiledDecoder(model, world)
    from ..engine.vae.decoder import BandedDecoder

    return BandedDecoder(model, world, groups)


def _load(message: LoadVae, tensors: Tensors, device: torch.device) -> BandedVae | TiledVae:
    if message.comfyui is None:
        from ..models.vae.module import load_vae

        return load_vae(tensors, device)
    from ..models.comfyui.vae import load_comfyui_vae

    return load_comfyui_vae(tensors, message.comfyui, device, message.metadata)


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _give_back(device: torch.device) -> None:
    """Returns what torch's allocator keeps of a device's memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
