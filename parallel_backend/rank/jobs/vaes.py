"""Half a VAE that a rank holds beside its models: all ranks decode latents, or encode images, with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...engine.comm.groups import Layouts
from ...errors import PlatformError, RequestError
from ...job.payload import HalfVae
from ...models.comfyui.rows.banded import OTHER_VERSION
from ...requests import LoadInfo
from ...wire.protocol import RankCall
from ..outcome.errors import is_fault

if TYPE_CHECKING:  # imported when they are first needed: they take seconds
    from ...engine.bands.tiles import TiledDecoder
    from ...engine.bands.vae import BandedNetwork


class StepCallback(Protocol):
    """A callback after each step, which raises Cancelled on all ranks at the same step. `is_cancelled()`: True if this
    rank has received a cancel; `finish()`: waits for the last steps."""

    def __call__(self, i: int, denoised: Tensor) -> None: ...

    def is_cancelled(self) -> bool: ...

    def finish(self) -> None: ...


class HeldVae:
    """The decoder or encoder of one VAE that a rank holds."""

    def __init__(self, half: HalfVae, layouts: Layouts) -> None:
        self._world, self._traffic = layouts.world, layouts.traffic
        self._encodes = half.encodes
        self._bytes = sum(one.nbytes for one in (*half.module.parameters(), *half.module.buffers()))
        self._dtype = str(half.dtype).removeprefix("torch.")
        self.is_checked = False  # set once all ranks agree that check() has passed
        with _other_version_as_refusal():
            self._network = _shared_out(half, layouts)

    def find(self, word: tuple[Any, ...]) -> Any:
        raise RequestError(f"A VAE's call names {word[0]}, which no device has.")

    def info(self, seconds: float, device: torch.device) -> LoadInfo:
        """Returns the record of its load on this rank's device, which took `seconds`."""
        computed = str(self._network.vae.compute_dtype).removeprefix("torch.")
        on_device = 0 if device.type == "cpu" else self._bytes
        return LoadInfo(seconds, self._bytes, False, self._dtype, computed, device_bytes=on_device)

    def check(self) -> None:
        """Checks that all ranks together compute what one rank computes. Raises PlatformError on the first rank if they
        do not, and on any rank where the network does not work that way. Collective."""
        with _other_version_as_refusal():
            self._network.check()

    def check_call(self, inputs: Tensor | None, shares: tuple[float, ...]) -> Tensor:
        """Returns the inputs. Raises RequestError, the same on every rank, if they cannot be split by `shares`."""
        ranks = self._world.world_size
        if shares and (len(shares) != ranks or min(shares) < 0 or not any(shares)):
            raise RequestError(
                f"shares is {list(shares)}; expected {ranks} numbers, one per process, none below 0 and one above it."
            )
        if inputs is None:
            raise RequestError("a VAE's call came without a latent or pixels.")
        self._network.vae.check_input(inputs)
        return inputs

    def call(
        self, inputs: Tensor, shares: tuple[float, ...], on_step: StepCallback
    ) -> tuple[Tensor | None, RankCall]:
        """Decodes latents into images [B, H, W, 3], frames of a video as images, or encodes pixels into latents
        [B, C, (t,) h, w]. Returns None on all ranks but the first. Computes one entry of the batch at a time, to save
        memory."""
        started, device, network = time.perf_counter(), self._world.device, self._network
        sent, before = self._traffic.bytes_sent, _start_peak(device)
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
        record = RankCall(
            seconds=time.perf_counter() - started,
            bytes_sent=self._traffic.bytes_sent - sent,
            parts=network.parts(inputs[0], shares)[self._world.rank],
            peak_bytes=_peak(device) - before,
        )
        if outputs is not None and not self._encodes:
            outputs = outputs.flatten(0, 1)
        elif outputs is not None:
            latent = outputs.movedim(-1, 1)  # [B, t, h, w, C] before
            outputs = (latent if network.vae.latent_dims == 3 else latent[:, :, 0]).contiguous()
        return outputs, record


@contextlib.contextmanager
def _other_version_as_refusal() -> Iterator[None]:
    """Within this context, an error of the network, such as one that another version of ComfyUI has changed, becomes a
    PlatformError: ComfyUI's process then computes without the ranks."""
    try:
        yield
    except Exception as failure:
        if isinstance(failure, PlatformError) or is_fault(failure):
            raise
        raise PlatformError(f"{OTHER_VERSION}: {failure}") from failure


def _shared_out(half: HalfVae, layouts: Layouts) -> BandedNetwork | TiledDecoder:
    from ...engine.bands.tiles import TiledDecoder
    from ...engine.bands.vae import BandedNetwork
    from ...models.comfyui.rows.vae_halves import ComfyUIVae, ComfyUIVaeEncoder, TiledComfyUIVae
    from ...models.tokens.vae_networks import VaeMode, known

    device = layouts.world.device
    dtype = torch.float32 if device.type == "cpu" else half.dtype
    latent = half.latent_channels, half.latent_dims
    if half.encodes:
        encoder = ComfyUIVaeEncoder(half.module, *latent, dtype, device, half.scale, half.in_channels)
        return BandedNetwork(encoder, layouts)
    found = known(half.module)
    if found is not None and found.way is VaeMode.TILES:
        return TiledDecoder(TiledComfyUIVae(half.module, *latent, dtype, device), layouts)
    return BandedNetwork(ComfyUIVae(half.module, *latent, dtype, device), layouts)


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
