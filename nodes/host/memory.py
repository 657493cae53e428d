"""The ranks' memory as ComfyUI's memory manager sees it, and its release when ComfyUI no longer uses the model."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

import comfy.model_management
import torch
from comfy.cli_args import args
from comfy_execution.utils import get_executing_context

from ...parallel_backend.devices import resolve_devices
from ...parallel_backend.machine.local import LOWVRAM, NOVRAM
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.planner.rules import Plan, StrategySettings
from ...parallel_backend.planner.workload.rank_memory import in_gib
from ...parallel_backend.requests import ModelSpec
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.events import Event, RequestEnded
from ...parallel_backend.sidecar.model_room import share_of_file
from .prompt_graph import names_file

# Networks of this process that stand for models on the ranks; several may stand for the same model.
_networks: weakref.WeakKeyDictionary[torch.nn.Module, ModelSpec] = weakref.WeakKeyDictionary()
# Networks of preloaded models, held until a prompt has used the model.
_ahead: dict[ModelSpec, torch.nn.Module] = {}
_taken: list[str] = []
_LOOK_AGAIN = 0.05  # s


def memory_flag() -> str:
    """Returns ComfyUI's own low-memory flag, or "" without one."""
    return NOVRAM if args.novram else LOWVRAM if args.lowvram else ""


def make_room(spec: ModelSpec, device: torch.device) -> bool:
    """Has idle ranks release this model, preloaded models, text encoders and VAEs. Returns False, and releases nothing,
    if ComfyUI runs with --highvram or --gpu-only: these keep models loaded as long as anything uses them.

    A running node needs memory on ComfyUI's own GPU, `device`: only the rank there releases models, and the others keep
    theirs. Between prompts a person asked for all memory, so all ranks release them.
    """
    if not drop_modules():
        return False
    for one in (*_ahead, spec):
        if (name := _name(device)) and get_executing_context() is not None:
            if held := held_on(device, one):
                _taken.append(
                    f"before this run ComfyUI took the room of {Path(one.path).name} on {name} for other work: "
                    f"{in_gib(held)} GiB left the device until they were needed again"
                )
            pool.give_back(one, name)
        else:
            pool.put_to_sleep(one)
    return True


def drop_modules() -> bool:
    """Has idle ranks release text encoders and VAEs. Returns False if --highvram or --gpu-only keeps them loaded."""
    if args.highvram or args.gpu_only:
        return False
    pool.drop_modules()
    return True


def modules_on(device: torch.device, number: int) -> int:
    """Returns the bytes that the text encoder with this number takes now in ranks on one of ComfyUI's devices."""
    return pool.module_bytes(_name(device), number)


def eviction_notes() -> list[str]:
    """Returns, in words, what make_room() has released since the last call of this function."""
    notes = list(dict.fromkeys(_taken))
    _taken.clear()
    return notes


def keep_ahead(spec: ModelSpec, network: torch.nn.Module) -> None:
    """Keeps a preloaded model on the ranks, though no graph uses it yet, until a prompt has used it."""
    held = {model for sidecar in pool.all_sidecars() for model in sidecar.models}
    for gone in [one for one in _ahead if one not in held]:
        del _ahead[gone]
    _ahead[spec] = network


def drop_ahead() -> None:
    """Releases the preloaded models when a person frees all memory: ComfyUI does not know of them yet."""
    for spec in list(_ahead):
        pool.put_to_sleep(spec)
    _ahead.clear()


def on_event(event: Event) -> None:
    """Stops holding a preloaded model once a request has used it: its prompt holds it from then on."""
    if isinstance(event, RequestEnded) and event.request != "preload" and event.spec in _ahead:
        _ahead.pop(event.spec, None)


def held_on(device: torch.device, spec: ModelSpec) -> int:
    """Returns the bytes of weights that the ranks hold now on one of ComfyUI's devices."""
    return pool.bytes_on(spec, _name(device))


def size_on(
    device: torch.device,
    spec: ModelSpec,
    file: ModelFile,
    settings: StrategySettings,
    plan: Plan | None,
) -> int:
    """Returns the bytes of weights that the ranks hold, or will hold, on one of ComfyUI's devices. The latest `plan`
    predicts them; without one the `settings` do."""
    name = _name(device)
    if held := held_on(device, spec):
        return held
    if plan is not None:
        return plan.memory.weights if name in plan.devices else 0
    devices = resolve_devices(settings.devices)
    if name not in devices:
        return 0
    return (
        share_of_file(settings.strategy, file.tensor_bytes)
        if settings.mode == "manual"
        else file.tensor_bytes
    )


def give_cache_back(device: torch.device, spec: ModelSpec) -> None:
    """Frees torch's cached memory in this process before a rank loads a model on the same GPU."""
    if device.type == "cuda" and not held_on(device, spec):
        comfy.model_management.soft_empty_cache()


def _name(device: torch.device) -> str:
    """Returns the ranks' name of one of ComfyUI's devices. "", which no rank has, for the CPU: there the ranks use the
    file's own pages, which the system takes back when it needs them."""
    return f"cuda:{device.index or 0}" if device.type == "cuda" else ""


def watch(network: torch.nn.Module, spec: ModelSpec) -> None:
    """Has the ranks release the model once ComfyUI has dropped every network that stands for it."""
    _networks[network] = spec
    weakref.finalize(network, _dropped, spec).atexit = False


def stands_for_ranks(model: object) -> bool:
    """Returns True if `model`, a patcher's, has a network that stands for a model on the ranks."""
    return getattr(model, "diffusion_model", None) in list(_networks)


def _dropped(spec: ModelSpec) -> None:
    # A finalizer runs in any garbage collection, perhaps in the middle of a request to the ranks: it must not wait.
    threading.Thread(target=_sleep_unless_used, args=(spec,), daemon=True).start()


def _sleep_unless_used(spec: ModelSpec) -> None:
    """Waits until no running prompt names the model's file, then has the ranks release it, unless a network uses it
    again: after a change before Parallel Model, ComfyUI drops the network and makes another one during the prompt."""
    from .prompt_links import running_prompts  # imports all of ComfyUI's nodes, so not at module load

    file = Path(spec.path).name
    while spec not in list(_networks.values()):
        if not any(names_file(prompt, file) for prompt in running_prompts().values()):
            return pool.put_to_sleep(spec)
        time.sleep(_LOOK_AGAIN)
