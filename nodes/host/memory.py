"""The ranks' memory as ComfyUI's memory manager sees it, and what becomes of it when nobody holds the model."""

from __future__ import annotations

import threading
import weakref

import torch
from comfy.cli_args import args

from ...parallel_backend.models.flux.checkpoint import FluxFile
from ...parallel_backend.planner.decide import LOWVRAM, NOVRAM, ExecutionPlan
from ...parallel_backend.requests import ModelSpec
from ...parallel_backend.sidecar import pool

# Networks that stand for models on the ranks, by what they stand for: several may share one.
_networks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def economy() -> str:
    """ComfyUI's own flag for little memory, as decide.ECONOMIES has it."""
    return NOVRAM if args.novram else LOWVRAM if args.lowvram else ""


def make_room(spec: ModelSpec) -> bool:
    """Has the ranks give the model's memory back, unless ComfyUI runs with --highvram, which leaves models where they
    are as long as anyone has them."""
    if args.highvram or args.gpu_only:
        return False
    pool.put_to_sleep(spec)
    return True


def size_on(device: torch.device, file: FluxFile, decided: ExecutionPlan | None) -> int:
    """Bytes of weights that the ranks hold, or will hold, on one of ComfyUI's devices.

    Nothing on the CPU: there the ranks use the file's own pages, which the system takes back when it needs them.
    """
    if device.type != "cuda":
        return 0
    if decided is None:
        return file.tensor_bytes
    name = f"cuda:{device.index or 0}"
    return decided.memory.weights if name in decided.devices else 0


def watch(network: torch.nn.Module, spec: ModelSpec) -> None:
    """Has the ranks give the model's memory back once ComfyUI has dropped every network that stands for it."""
    _networks.add(network)
    weakref.finalize(network, _dropped, spec).atexit = False


def _dropped(spec: ModelSpec) -> None:
    # A finalizer runs wherever memory is collected, which may be while ranks are asked for something: it must not wait.
    threading.Thread(target=_sleep_unless_used, args=(spec,), daemon=True).start()


def _sleep_unless_used(spec: ModelSpec) -> None:
    if not any(network.spec == spec for network in list(_networks)):
        pool.put_to_sleep(spec)
