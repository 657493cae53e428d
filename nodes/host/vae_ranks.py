"""The ranks that compute for Parallel VAE Decode and Encode: which ones, and how much of each picture."""

from __future__ import annotations

import comfy.model_management
import comfy.sd
from torch import Tensor

from ...parallel_backend.devices import devices_of_a_run
from ...parallel_backend.machine.device_shares import read_shares
from ...parallel_backend.observability.gauges import read_free_bytes
from ...parallel_backend.planner.history import open_history
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.vae_choice import VaeChoice
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import State
from ...parallel_backend.sidecar.sidecar import Sidecar
from .offload import comfyui_device, release_cache
from .settings import setting

# Free memory that one device must have to compute a picture alone, as a multiple of what ComfyUI expects it to take.
_SPARE = 1.5


def choose_ranks(settings: StrategySettings) -> tuple[Sidecar, tuple[float, ...], list[str]]:
    """Returns the ranks to use, each one's share, and notes. Running ranks are preferred if they hold a model."""
    chosen = devices_of_a_run(settings.devices)
    requested = chosen[: settings.strategy.world_size] if settings.mode == "manual" else chosen
    running = pool.running_within(chosen)
    if running is not None and running.state is State.READY and not running.models:
        running = None  # to replace them costs at most another load of a VAE
    sidecar = running or pool.get_sidecar(requested)
    share_of = dict(
        zip(chosen, read_shares(settings.device_shares, chosen), strict=False)
    )  # empty: equal shares
    shares = tuple(share_of[device] for device in sidecar.devices) if share_of else ()
    if sidecar.devices == requested:
        return sidecar, shares, []
    used = len(sidecar.devices)
    note = (
        f"note: {used} of the {len(chosen)} devices chosen had running processes; they stay, with their model"
    )
    return sidecar, shares, [note]


class SharedOut:
    """The ranks for the pictures of one call. `shares`: how much of each picture a rank takes; if not set by hand, all
    ranks share it or one takes it alone, whichever is faster. `inputs`: the tensor that the ranks get; `bytes_alone`:
    the bytes that one device needs for one picture."""

    def __init__(
        self,
        settings: StrategySettings,
        vae: comfy.sd.VAE,
        inputs: Tensor,
        bytes_alone: float,
        *,
        encodes: bool,
    ) -> None:
        self.sidecar, self._shares, self.notes = choose_ranks(settings)
        devices = self.sidecar.devices
        make_room(bytes_alone, self.sidecar)
        is_free = settings.mode == "auto" and not self._shares and not settings.compared and len(devices) > 1
        self.choice = VaeChoice(
            open_history(devices),
            f"{type(vae.first_stage_model).__name__} {'encode' if encodes else 'decode'} {vae.vae_dtype}",
            tuple(inputs.shape[1:]),
            tries=bool(setting("try_strategies")),
        )
        has_room = is_free and read_free_bytes(devices[0]) >= _SPARE * bytes_alone
        self.is_alone = len(devices) == 1 or (is_free and has_room and self.choice.is_alone())

    def record(self, seconds: float) -> None:
        """Stores the seconds that a picture took, unless the shares were set by hand."""
        if self.is_alone or not self._shares:
            self.choice.record(seconds, is_alone=self.is_alone)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each picture that every rank takes; empty for equal shares."""
        idle = len(self.sidecar.devices) - 1
        return (1.0, *(0.0,) * idle) if self.is_alone and idle else self._shares

    def give_up_alone(self) -> bool:
        """Switches from one rank to all of them after the one failed. Returns False if all were used already."""
        if not self.is_alone or len(self.sidecar.devices) == 1:
            return False
        self.choice.give_up()
        self.is_alone = False
        return True


def decode_here(vae: comfy.sd.VAE, latent: Tensor) -> Tensor:
    """Decodes in ComfyUI's process and returns IMAGE [N, H, W, C]; frames of a video become images, as in VAEDecode."""
    image: Tensor = vae.decode(latent)
    return image.reshape(-1, *image.shape[-3:]) if image.ndim == 5 else image


def make_room(bytes_alone: float, sidecar: Sidecar) -> None:
    """Has ComfyUI move its own models until each GPU of the ranks has its part of `bytes_alone` free."""
    found = {one.device for one in comfy.model_management.current_loaded_models}
    for device in map(comfyui_device, sidecar.devices):
        if device in found:  # asking for the free memory of any other would create a CUDA context there
            comfy.model_management.free_memory(bytes_alone / len(sidecar.devices), device)
    release_cache()
