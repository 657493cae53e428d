"""The VAE that a rank holds beside its model: the latents it decodes with it, and the images that it encodes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import RequestError
from ..requests import LoadInfo
from ..wire.decode_messages import Decode, Encode, RankDecode, check_decode, check_encode
from ..wire.payloads import Tensors
from ..wire.protocol import LoadVae
from .outcome.errors import PeerFailed
from .work.step_boundary import StepBoundary

if TYPE_CHECKING:
    from ..engine.bands.tiles import TiledDecoder
    from ..engine.bands.vae import BandedNetwork, RankGroups
    from ..engine.comm.groups import World

    SharedHalf = BandedNetwork | TiledDecoder  # of a VAE, by the ranks


class VaeWorker:
    """One decoder at most, and one encoder, under the identities they were sent with.

    `all_good(error)`: whether no rank has one; collective.
    """

    def __init__(self, world: World, all_good: Callable[[Exception | None], bool]) -> None:
        self._world = world
        self._all_good = all_good
        self._held: dict[bool, tuple[str, SharedHalf]] = {}  # by LoadVae.encodes
        self._groups: RankGroups = {}

    def load(self, message: LoadVae, tensors: Tensors) -> LoadInfo:
        """Holds this decoder or encoder in place of another, on every rank or on none."""
        begun = time.perf_counter()
        self._drop(message.encodes)
        network: SharedHalf | None = None
        error: Exception | None = None
        try:
            network = _load(message, tensors, self._world, self._groups)
        except Exception as failure:
            error = failure
        is_held = self._all_good(error)
        if is_held and network is not None:
            try:  # all ranks meet in it, so none may have failed before
                network.check()
            except Exception as failure:
                error = failure
            is_held = self._all_good(error)
        if not is_held or network is None:
            network = None
            self._drop(message.encodes)
            raise error or PeerFailed("another process could not hold the VAE")
        self._held[message.encodes] = message.identity, network
        return LoadInfo(
            seconds=time.perf_counter() - begun,
            bytes=network.vae.bytes,
            cached=False,
            dtype=_name(next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())),
            compute_dtype=_name(network.vae.compute_dtype),
        )

    def steps(self, tensors: Tensors) -> int:
        """Step boundaries that decoding or encoding these tensors passes."""
        encodes = "pixels" in tensors
        if encodes not in self._held:
            return 0
        return self._held[encodes][1].vae.steps * len(tensors.get("pixels" if encodes else "latent", ()))

    def decode(
        self, message: Decode, tensors: Tensors, on_step: StepBoundary
    ) -> tuple[Tensors | None, RankDecode]:
        """{"image": [B, H, W, 3]} on rank 0, frames of a video as images."""
        decoder, latent = self._checked(message, tensors)
        images, run = self._run(decoder, latent, message.shares, on_step)
        return None if images is None else {"image": images.flatten(0, 1)}, run

    def encode(
        self, message: Encode, tensors: Tensors, on_step: StepBoundary
    ) -> tuple[Tensors | None, RankDecode]:
        """{"latent": [B, C, (t,) h, w]} on rank 0."""
        encoder, pixels = self._checked(message, tensors)
        latents, run = self._run(encoder, pixels, message.shares, on_step)
        if latents is None:
            return None, run
        latent = latents.movedim(-1, 1)  # [B, t, h, w, C] before
        return {"latent": (latent if encoder.vae.latent_dims == 3 else latent[:, :, 0]).contiguous()}, run

    def _run(
        self, network: SharedHalf, inputs: Tensor, shares: tuple[float, ...], on_step: StepBoundary
    ) -> tuple[Tensor | None, RankDecode]:
        """[B, T, H, W, C] on rank 0; one of the batch after the other, so that it needs no more memory."""
        begun = time.perf_counter()
        device = self._world.device
        sent, before = network.bytes_sent, _start_peak(device)
        step = 0

        def after_layers() -> None:
            nonlocal step
            on_step(step, inputs)
            step += 1

        outputs: Tensor | None = None
        for i, one in enumerate(inputs):
            frames = network(one, shares, after_layers)
            if frames is None:
                continue
            if outputs is None:
                outputs = torch.empty(len(inputs), *frames.shape, dtype=frames.dtype)
            outputs[i] = frames
        on_step.finish()
        run = RankDecode(
            seconds=time.perf_counter() - begun,
            rows=network.parts(inputs[0], shares)[self._world.rank],
            bytes_sent=network.bytes_sent - sent,
            peak_bytes=_peak(device) - before,
            compute_dtype=_name(network.vae.compute_dtype),
        )
        _give_back(device)  # the sampler's next step may need what the largest layers took
        return outputs, run

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    def drop(self) -> None:
        """The decoder and the encoder."""
        self._held.clear()
        self._collect()

    def _drop(self, encodes: bool) -> None:
        self._held.pop(encodes, None)
        self._collect()

    def _collect(self) -> None:
        gc.collect()  # a network and the hooks on its layers refer to each other
        _give_back(self._world.device)

    def _checked(self, message: Decode | Encode, tensors: Tensors) -> tuple[SharedHalf, Tensor]:
        """The network and what it gets [B, C, (t,) h, w], checked alike on every rank before any of them begins."""
        encodes = isinstance(message, Encode)
        identity, network = self._held.get(encodes, ("", None))
        if network is None or identity != message.identity:
            raise RequestError("the processes do not hold the VAE of this request.")
        name, check = ("pixels", check_encode) if encodes else ("latent", check_decode)
        if set(tensors) != {name}:
            raise RequestError(f"{name} was expected, not the tensors {', '.join(sorted(tensors))}.")
        check(tensors[name], message.shares, self._world.world_size)
        network.check_input(tensors[name])
        return network, tensors[name]


def _load(message: LoadVae, tensors: Tensors, world: World, groups: RankGroups) -> SharedHalf:
    from ..engine.bands.tiles import TiledDecoder
    from ..engine.bands.vae import BandedDecoder, BandedEncoder

    if message.encodes:
        from ..models.comfyui.rows.vae_encoder import load_comfyui_encoder

        return BandedEncoder(load_comfyui_encoder(tensors, message.comfyui, world.device), world, groups)
    from ..models.comfyui.rows.vae_halves import TiledComfyUIVae, load_comfyui_vae

    vae = load_comfyui_vae(tensors, message.comfyui, world.device, message.metadata)
    return TiledDecoder(vae, world) if isinstance(vae, TiledComfyUIVae) else BandedDecoder(vae, world, groups)


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
