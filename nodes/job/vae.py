"""The half of a VAE, encoder or decoder, that runs on the ranks; which ranks, and how much of each picture. VAEs that
they cannot split are refused."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor, nn

from ...parallel_backend.devices import devices_of_a_run, machine_of
from ...parallel_backend.errors import RequestError
from ...parallel_backend.job.changes import is_note, is_put_back
from ...parallel_backend.job.payload import INPUTS, HalfVae, VaeCall
from ...parallel_backend.job.purity import is_pure
from ...parallel_backend.machine.device_shares import read_shares
from ...parallel_backend.models.comfyui.rows.banded import STEPS
from ...parallel_backend.models.tokens.vae_networks import (
    DECODER_ALONE,
    ENCODER_ALONE,
    VaeMode,
    decoder_of,
    encoder_of,
    encodes_in_bands,
    frames_among_channels,
    frames_are_a_batch,
    known,
)
from ...parallel_backend.observability.gauges import read_free_bytes
from ...parallel_backend.planner.history import open_history
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.planner.vae_choice import VaeChoice
from ...parallel_backend.requests import ComfyUISource
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import State
from ...parallel_backend.sidecar.module_requests import ModuleAnswer, ModuleKind, ModuleRequest
from ...parallel_backend.sidecar.sidecar import Sidecar
from ...parallel_backend.wire.transport import MOST_BYTES
from ..host.calls import interrupted, report_progress
from ..host.comfyui_flags import comfyui_root, numeric_flags
from ..host.offload import comfyui_device, release_cache, unload
from ..host.settings import setting
from .outline import unloaded
from .ship import HeldByRanks, Shipment, held_numbers, replaced_now

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Packages whose classes and functions VAEs consist of.
_THEIRS = ("comfy.", "torch.", "einops.")

# Free memory that one device must have to compute a picture alone, as a multiple of what ComfyUI expects it to take.
_SPARE = 1.5
PIXELS_PER_POSITION = 64  # pixels per position of a latent in most VAEs; others have more


# The halves of each network that ranks were sent, by True for the encoder.
_held: weakref.WeakKeyDictionary[nn.Module, dict[bool, HeldByRanks]] = weakref.WeakKeyDictionary()


class CannotBeSplit(Exception):
    """The reason, in a user's words, why the ranks cannot decode or encode with a VAE."""


def check_splittable(vae: comfy.sd.VAE, *, encodes: bool) -> None:
    """Raises CannotBeSplit with the reason why the ranks cannot encode or decode with the VAE."""
    if reason := _why_not_split(vae, encodes=encodes):
        raise CannotBeSplit(f"this VAE cannot be split: {reason}")


def _why_not_split(vae: comfy.sd.VAE, *, encodes: bool) -> str:
    network, method = vae.first_stage_model, "encode" if encodes else "decode"
    half = (encoder_of if encodes else decoder_of)(network)
    found = known(network)
    is_known = encodes_in_bands(network) if encodes else found is not None
    if not is_known:
        kind = type(network).__name__ + (f" with {type(half).__name__}" if half is not None else "")
        return f"its network is {kind}, which the devices do not know how to share out exactly"
    if not encodes and found is not None and found.way is VaeMode.ONE_DEVICE:
        return found.reason
    own = getattr(type(vae), method) is getattr(comfy.sd.VAE, method) and method not in vars(vae)
    if not own or _is_changed(network) or (not encodes and getattr(half, "tanh_out", False)):
        return "another node has changed how it computes"
    if vae.patcher.patches or vae.patcher.object_patches:
        return "another node has patched it"
    modules = {kind.__module__ for kind in map(type, network.modules())}
    if any(one.module in modules and not is_pure(one.value) for one in replaced_now()[0]):
        return (
            "a pack has put a function into it that may keep something from one part of a picture to the next"
        )
    return ""


def refuse_other_kinds(vae: comfy.sd.VAE) -> None:
    """Raises RequestError for a VAE that makes no pictures."""
    found = known(vae.first_stage_model)
    if found is not None and found.way is VaeMode.REFUSED:
        raise RequestError(f"This VAE makes no pictures: {found.reason}")


def cuts_tiles(vae: comfy.sd.VAE) -> bool:
    """Returns True if the VAE's network itself decodes in tiles, in ComfyUI as well."""
    found = known(vae.first_stage_model)
    return found is not None and found.way is VaeMode.TILES


def as_sent(vae: comfy.sd.VAE, latent: Tensor) -> Tensor:
    """Returns the latent [B, C, …] in the form that the ranks take. If the decoder needs noise, it is drawn here as the
    network would draw it. The frames of a video get a dimension of their own."""
    network = vae.first_stage_model
    if getattr(network, "timestep_conditioning", False):
        placed = latent.to(vae.device, vae.vae_dtype)
        part = network.decode_noise_scale
        latent = torch.randn_like(placed) * part + (1.0 - part) * placed
    if latent.ndim == 4 and frames_among_channels(network) and latent.shape[1] % vae.latent_channels == 0:
        return latent.unflatten(1, (vae.latent_channels, -1))
    return latent.movedim(0, 1)[None] if frames_are_a_batch(network) else latent


class VaeShipment(Shipment):
    """One decode or encode on its way to the ranks, for a VAE that check_splittable has passed.
    `inputs`: the tensor that its network takes."""

    def __init__(
        self, vae: comfy.sd.VAE, inputs: Tensor, shares: tuple[float, ...], *, encodes: bool
    ) -> None:
        super().__init__(None, VaeCall(shares), vae.patcher.load_device)
        self._vae, self._inputs, self._encodes = vae, inputs, encodes

    def run(self, sidecar: Sidecar, on_step: Callable[[int, int], None]) -> ModuleAnswer:
        """Returns the answer with images [B, H, W, 3] in the compute dtype, about -1..1 (for videos the frames, one
        after the other), or with the latent. Raises CannotBeSent, RequestError or PlatformError."""
        inputs, vae = self._inputs, self._vae
        if not inputs.numel():
            raise RequestError(
                f"the {'pixels have' if self._encodes else 'latent has'} shape {list(inputs.shape)}; expected at least "
                "one picture, with sides no smaller than one position of the latent (8 or more pixels)."
            )
        if inputs.nbytes > MOST_BYTES:
            raise RequestError(
                f"the pixels take {inputs.nbytes / 2**30:.1f} GiB, and at most {MOST_BYTES / 2**30:.1f} GiB can be "
                f"sent to the devices at once. Encode fewer images or frames at a time, or use VAE Encode."
            )
        self._is_elsewhere = any(map(machine_of, sidecar.devices))
        unload(vae.patcher)
        module = _half(vae.first_stage_model, ENCODER_ALONE if not self._encodes else DECODER_ALONE)
        held = self._hold(module)
        half = HalfVae(module, self._encodes, vae.latent_channels, vae.latent_dim, vae.vae_dtype)
        if self._encodes:
            half = replace(half, scale=vae.spacial_compression_encode(), in_channels=vae.output_channels)
        request = ModuleRequest(
            ModuleKind.VAE_ENCODER if self._encodes else ModuleKind.VAE_DECODER,
            number=held.number,
            keep=held_numbers(),
            bytes=sum(tensor.nbytes for tensor in module.state_dict().values()),
            comfyui=ComfyUISource(comfyui_root(), numeric_flags()),
            module=lambda holdings: self._pack_module(holdings, half),
            tensors=lambda holdings, is_new: self._pack(holdings, is_new) | {INPUTS: inputs},
            images=len(inputs),
            steps=STEPS * len(inputs),
            positions=inputs[0, 0].numel() // (PIXELS_PER_POSITION if self._encodes else 1),
        )
        with self._sending(sidecar):
            return sidecar.call_module(request, on_step, report_progress, interrupted)

    def _hold(self, module: nn.Module) -> HeldByRanks:
        """Returns the half that ranks were sent, or a new one if it computes differently since."""
        vae = self._vae
        weights = _digest(module.state_dict().values(), vae)
        mark = weights, vae.vae_dtype, self._job.replaced, _attributes(module)
        halves = _held.setdefault(vae.first_stage_model, {})
        if self._encodes not in halves or halves[self._encodes].mark != mark:
            halves[self._encodes] = HeldByRanks(mark)
        return halves[self._encodes]


def _half(network: nn.Module, without: tuple[str, ...]) -> nn.Module:
    """Returns a network over the same parameters that lacks some of its parts."""
    found = unloaded(network)
    for part in without:
        found._modules.pop(part, None)
    return found


def _dtype_of(tensor: Tensor, vae: comfy.sd.VAE) -> torch.dtype:
    return vae.vae_dtype if tensor.is_floating_point() else tensor.dtype


def _is_changed(network: nn.Module) -> bool:
    """Returns True if any layer has circular padding, hooks, or another class or other methods than ComfyUI's."""
    for layer in network.modules():
        own = vars(layer)
        functions = [
            value
            for name, value in own.items()
            if callable(value) and not is_note(name) and not is_put_back(name, layer)
        ]
        if any(map(own.get, _HOOKS)) or not all(map(_is_theirs, (type(layer), *functions))):
            return True
        if getattr(layer, "padding_mode", "zeros") == "circular":
            return True
    return False


def _is_theirs(code: Any) -> bool:
    """Returns True for a class or function of ComfyUI, torch or einops, and False for a method of another layer."""
    if isinstance(code, types.MethodType):
        return not isinstance(code.__self__, nn.Module) and _is_theirs(code.__func__)
    is_plain = isinstance(code, (type, types.FunctionType, types.BuiltinFunctionType))
    return is_plain and f"{code.__module__}.".startswith(_THEIRS)


def _attributes(network: nn.Module) -> list[Any]:
    """Returns the plain values and functions that are attributes of a network's layers."""
    kinds = (bool, int, float, str, tuple, list, types.NoneType, types.FunctionType)
    return [
        (name, list(value) if isinstance(value, list) else value)
        for layer in network.modules()
        for name, value in vars(layer).items()
        if isinstance(value, kinds) and not is_note(name)
    ]


def _digest(tensors: Iterable[Tensor], vae: comfy.sd.VAE) -> str:
    """Returns a digest of a network's weights that changes when something writes into them, and not when they move.
    With dynamic VRAM ComfyUI moves small weights to its GPU, some of them in the compute dtype, and leaves the others
    in host memory in the file's dtype."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        computed = tensor.to(_dtype_of(tensor, vae))
        sums.append(computed.view(integers[computed.element_size()]).sum(dtype=torch.int64).cpu())
    return f"{hash(tuple(torch.stack(sums).tolist())):x}"


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
