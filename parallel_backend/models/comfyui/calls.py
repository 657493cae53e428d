"""The call of a diffusion model as ComfyUI's BaseModel makes it, without what only ComfyUI's process has a use for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...requests import ATTENTION, BANDS, TOKEN_MODES, ModuleCall
from ...wire.arguments import map_tensors
from ..proof.states import Verdict, trusted_mode
from .patches import ARGUMENT, call_inside_blocks
from .unet_patches import UNET_PATCHES

OPTIONS = "transformer_options"
# What ComfyUI's sampling alone does with a call: wrappers have run by then (those of EasyCache and of context windows
# keep their state there), and weights are fetched elsewhere.
HOST_ONLY = frozenset(
    {
        "wrappers",
        "callbacks",
        "uuids",
        "prefetch_dynamic_vbars",
        "multigpu_thread_device",
        "multigpu_thread_pool",
        "easycache",
        "context_window",
        # Go apart (patches.py), and what a sampler of causal models begins with.
        "patches",
        "patches_replace",
        "ar_state",
        "ar_config",
    }
)
# Arguments that ComfyUI makes where the model computes, or the pack for ranks alone, whatever lies in them.
_MADE_THERE = frozenset({OPTIONS, "control", ARGUMENT})
# Objects that ComfyUI prepares for a module and that the module makes itself where they are missing.
_MADE_BY_MODULE = {("minimax_payload", "layout")}


def module_call(
    module_class: str, verdict: Verdict, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ModuleCall:
    """Of (latent, timestep), with the rest by name. `verdict`: on the class."""
    sent = {name: without_made(name, value) for name, value in kwargs.items()}
    options = sent.get(OPTIONS) or {}
    sent[OPTIONS] = {key: value for key, value in options.items() if key not in HOST_ONLY}
    mode = trusted_mode(module_class, sent, verdict)
    if ARGUMENT in sent and call_inside_blocks(sent[ARGUMENT], UNET_PATCHES if mode == BANDS else ()):
        mode = max(mode, ATTENTION, key=TOKEN_MODES.index)
    return ModuleCall(args, sent, row_count(args[0]), mode)


def without_made(name: str, value: Any) -> Any:
    """The argument of this name without what the module makes itself."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if (name, key) not in _MADE_BY_MODULE}


def made_replaced(name: str, value: Any, stand_in: Callable[[], Any]) -> Any:
    """The argument of this name with `stand_in()` for what the module makes itself. ComfyUI puts prompts into one call
    where their arguments are equal, and two such objects never are."""
    if not isinstance(value, dict):
        return value
    return {key: stand_in() if (name, key) in _MADE_BY_MODULE else item for key, item in value.items()}


def in_host_memory(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a call's arguments by name that ComfyUI leaves in host memory wherever the model computes. Its
    BaseModel moves tensors and lists of them; what lies in dicts modules take there themselves, and read on the host
    without waiting for a device (MiniMax-H3's payload, LTX's guides)."""
    found: list[Tensor] = []
    for name, value in kwargs.items():
        if name not in _MADE_THERE:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(item, Tensor):
                    map_tensors(item, found.append)
    return found


def row_count(latent: Tensor | list[Tensor]) -> int:
    """Of a latent, or of one that is in several parts (video and sound)."""
    return len(latent) if isinstance(latent, Tensor) else len(latent[0])
