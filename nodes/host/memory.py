"""The ranks' memory as ComfyUI's memory manager sees it, and what becomes of it when nobody holds the model."""

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

# Networks that stand for models on the ranks, with what they stand for: several may share one.
_networks: weakref.WeakKeyDictionary[torch.nn.Module, ModelSpec] = weakref.WeakKeyDictionary()
# Those of models that were loaded ahead of their first prompt, until it has a network of its own.
_ahead: dict[ModelSpec, torch.nn.Module] = {}
_taken: list[str] = []
_LOOK_AGAIN = 0.05  # s


def memory_flag() -> str:
    """ComfyUI's own flag for little memory, or nothing."""
    return NOVRAM if args.novram else LOWVRAM if args.lowvram else ""


def make_room(spec: ModelSpec, device: torch.device) -> bool:
    """Has the ranks give the model's memory back, unless ComfyUI runs with --highvram, which leaves models where they
    are as long as anyone has them.

    A node that runs needs memory on ComfyUI's own GPU, `device`, where one rank lies, and the others keep theirs; what
    asks between prompts is a person who wants all of it. What no prompt has used yet gives way with it.
    """
    if not drop_modules():
        return False
    for one in (*_ahead, spec):
        if device.type == "cuda" and get_executing_context() is not None:
            _note_taken(one, device)
            pool.give_back(one, _name(device))
        else:
            pool.put_to_sleep(one)
    return True


def drop_modules() -> bool:
    """Has the ranks let go of text encoders and VAEs, unless ComfyUI runs with --highvram."""
    if args.highvram or args.gpu_only:
        return False
    pool.drop_modules()
    return True


def modules_on(device: torch.device, number: int) -> int:
    """Returns the bytes of one of ComfyUI's devices that ranks hold now for the text encoder with this number."""
    return pool.module_bytes(_name(device), number) if device.type == "cuda" else 0


def _note_taken(spec: ModelSpec, device: torch.device) -> None:
    if held := held_on(device, spec):
        _taken.append(
            f"before this run ComfyUI took the room of {Path(spec.path).name} on {_name(device)} for other work: "
            f"{in_gib(held)} GiB left the device until they were needed again"
        )


def eviction_notes() -> list[str]:
    """In words, what make_room() has given away since it was asked last."""
    notes = list(dict.fromkeys(_taken))
    _taken.clear()
    return notes


def keep_ahead(spec: ModelSpec, network: torch.nn.Module) -> None:
    """Has the ranks keep a model that no graph holds yet, until a prompt has used it."""
    held = {model for sidecar in pool.all_sidecars() for model in sidecar.models}
    for gone in [one for one in _ahead if one not in held]:
        del _ahead[gone]
    _ahead[spec] = network


def drop_ahead() -> None:
    """A person wants all memory, and ComfyUI knows nothing yet of what no prompt has used."""
    for spec in list(_ahead):
        pool.put_to_sleep(spec)
    _ahead.clear()


def on_event(event: Event) -> None:
    """A prompt that has used a model holds it from then on, as any other."""
    if isinstance(event, RequestEnded) and event.request != "preload" and event.spec in _ahead:
        _ahead.pop(event.spec, None)


def held_on(device: torch.device, spec: ModelSpec) -> int:
    """Bytes of weights that the ranks hold on one of ComfyUI's devices now.

    Nothing on the CPU: there the ranks use the file's own pages, which the system takes back when it needs them.
    """
    return pool.bytes_on(spec, _name(device)) if device.type == "cuda" else 0


def size_on(
    device: torch.device,
    spec: ModelSpec,
    file: ModelFile,
    settings: StrategySettings,
    plan: Plan | None,
) -> int:
    """Bytes of weights that the ranks hold on one of ComfyUI's devices, or will: as the latest `plan` foresaw, else as
    the `settings` tell."""
    if device.type != "cuda":
        return 0
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
    """Before ranks load a model, gives back what torch keeps here of their common GPU for its next allocations."""
    if device.type == "cuda" and not held_on(device, spec):
        comfy.model_management.soft_empty_cache()


def _name(device: torch.device) -> str:
    return f"cuda:{device.index or 0}"


def watch(network: torch.nn.Module, spec: ModelSpec) -> None:
    """Has the ranks give the model's memory back once ComfyUI has dropped every network that stands for it."""
    _networks[network] = spec
    weakref.finalize(network, _dropped, spec).atexit = False


def stands_for_ranks(model: object) -> bool:
    """Whether what a patcher holds is a network whose weights are the ranks'."""
    return getattr(model, "diffusion_model", None) in list(_networks)


def _dropped(spec: ModelSpec) -> None:
    # A finalizer runs wherever memory is collected, which may be while ranks are asked for something: it must not wait.
    threading.Thread(target=_sleep_unless_used, args=(spec,), daemon=True).start()


def _sleep_unless_used(spec: ModelSpec) -> None:
    """Has the ranks let go of a model that nothing here uses, and no running prompt is about to: where a node before
    Parallel Model has changed, ComfyUI drops the network as the prompt begins, and makes another one in it."""
    from .prompt_links import running_prompts  # which imports all of ComfyUI's nodes

    file = Path(spec.path).name
    while spec not in list(_networks.values()):
        if not any(names_file(prompt, file) for prompt in running_prompts().values()):
            return pool.put_to_sleep(spec)
        time.sleep(_LOOK_AGAIN)
