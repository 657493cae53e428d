"""ComfyUI's own models on the ranks' devices: they move away before a run; those that stay count as used memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import comfy.model_management
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher

from ...parallel_backend.devices import machine_of
from ...parallel_backend.planner.rules import Plan
from ...parallel_backend.planner.workload import in_use as memory_in_use
from ...parallel_backend.planner.workload.fit import Capacity
from ...parallel_backend.planner.workload.rank_memory import in_gib
from ...parallel_backend.sidecar import pool
from .memory import stands_for_ranks

# Names that the Python modules of text encoders begin with. A running sampler needs no text encoder and no VAE. Other
# models in use (a ControlNet, another diffusion model) stay where they are, and count as used memory.
_ENCODERS = ("comfy.text_encoders.", "comfy.sd1_clip", "comfy.sdxl_clip", "comfy.clip_vision")


def offload_comfyui_models(plan: Plan) -> tuple[str, ...]:
    """Has ComfyUI free on each device the memory that its rank is predicted to take. Returns in words what moved.

    ComfyUI itself frees memory only on the device where it would load the model: a text encoder elsewhere would stay.
    What the flag --reserve-vram keeps free stays free beside the ranks.
    """
    notes, short = list(_drop_modules(plan)), False
    for name in plan.devices[: plan.strategy.world_size]:
        device = comfyui_device(name)
        if device is None:
            continue
        missing = plan.memory.private_bytes + pool.module_bytes(name) - memory_in_use.used_by_ranks(name)
        short |= missing > 0
        before = [(one, one.model_loaded_memory()) for one in _movable(device)]
        if missing <= 0 or not before:
            continue
        staying = [one for one in _loaded() if all(one is not other for other, _ in before)]
        comfy.model_management.free_memory(missing + _reserved(), device, keep_loaded=staying)
        for one, size in before:
            left = one.model_loaded_memory() if any(one is other for other in _loaded()) else 0
            if left < size and one.model is not None:
                kind = type(one.model.model).__name__
                notes.append(
                    f"{kind} made room on {name}: {in_gib(size - left)} GiB of it went to host memory"
                )
    if short:
        release_cache()
    return tuple(notes)


def _drop_modules(plan: Plan) -> Iterator[str]:
    """Drops the ranks' text encoders and VAEs if the plan does not fit beside them; yields in words what left."""
    devices = plan.devices[: plan.strategy.world_size]
    held = [pool.module_bytes(name) for name in devices]
    if not any(held):
        return
    capacity = Capacity.of(devices)
    rooms = zip(capacity.sizes, capacity.used_elsewhere, held, strict=True)
    if all(size >= plan.memory.private_bytes + used + modules for size, used, modules in rooms):
        return
    started = time.perf_counter()
    pool.drop_modules()
    seconds = time.perf_counter() - started
    for name, size in zip(devices, held, strict=True):
        if size:
            yield (
                f"text encoders and VAEs made room on {name}: {in_gib(size)} GiB of them left it in {seconds:.2f} s, "
                "until they are called again"
            )


def unload(patcher: ModelPatcher) -> None:
    """Has ComfyUI unload a model if it has loaded it: the ranks compute with it instead."""
    if is_loaded(patcher):
        comfy.model_management.unload_model_and_clones(patcher)


def is_loaded(patcher: ModelPatcher) -> bool:
    """Returns True if ComfyUI itself has the model, or a clone of it, loaded."""
    return any(one.model is not None and one.model.model is patcher.model for one in _loaded())


def comfyui_device(name: str) -> torch.device | None:
    """Returns ComfyUI's device for the name of a rank's device; None for the CPU or another machine's."""
    return torch.device(name) if name.startswith("cuda:") and not machine_of(name) else None


def release_cache() -> None:
    """Frees the GPU memory that torch caches in this process: to the ranks it looks taken."""
    if torch.cuda.is_initialized():
        comfy.model_management.soft_empty_cache()


def can_free(device: str) -> int:
    """Returns the bytes that ComfyUI's process can free on a device: its models that are not in use and torch's cache,
    less what the flag --reserve-vram keeps for other programs. May be negative."""
    if not torch.cuda.is_initialized():
        return -_reserved()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return cached + sum(one.model_loaded_memory() for one in _movable(torch.device(device))) - _reserved()


def _reserved() -> int:
    """Returns the bytes of each GPU that ComfyUI's flag --reserve-vram keeps free, beside what other programs use."""
    return int((getattr(args, "reserve_vram", None) or 0) * 2**30)


def _movable(device: torch.device) -> Iterator[comfy.model_management.LoadedModel]:
    """Yields ComfyUI's loaded models on the device that the running sampler does not use."""
    for one in _loaded():
        network = None if one.model is None else one.model.model
        if one.device != device or network is None or stands_for_ranks(network):
            continue
        is_for_prompts = type(network).__module__.startswith(_ENCODERS) or hasattr(network, "decode")
        if is_for_prompts or not one.currently_used:
            yield one


def _loaded() -> list[comfy.model_management.LoadedModel]:
    return list(comfy.model_management.current_loaded_models)


memory_in_use.FREEABLE.append(can_free)
