"""ComfyUI's ModelPatcher in a rank: over the model that the rank holds, and over those that come with a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ....errors import RequestError

if TYPE_CHECKING:
    from ..model import ComfyUIModel

_OWNED = ("weight", "bias")


def root_patcher(model: ComfyUIModel) -> Any:
    """The patcher over the model whose weights lie where they are to stay. One for as long as the model is held: it
    knows which patches are in the weights."""
    from comfy.model_patcher import ModelPatcher

    kind: Any = _kind_of(ModelPatcher, is_sharded=model.byte_sharding is not None)
    found = kind(model.patcher.model, model.patcher.load_device, model.patcher.offload_device)
    found.offload_device = found.load_device
    return found


def local_patcher(root: Any, state: Sequence[str]) -> Any:
    """A clone without options, to be filled from ComfyUI's process. `state`: what stays the rank's own."""
    kind: Any = type(root)
    found = kind.__new__(kind)
    found.__dict__.update({name: root.__dict__[name] for name in state if name in root.__dict__})
    found.parent = None
    return found


def other_patcher(device: torch.device) -> Any:
    """A patcher of a second model that travels with the job; ComfyUI's memory manager moves it to `device`."""
    from comfy.model_patcher import ModelPatcher

    found = ModelPatcher.__new__(ModelPatcher)
    found.__dict__.update(
        backup={},
        backup_buffers={},
        object_patches_backup={},
        pinned=set(),
        parent=None,
        size=0,
        load_device=device,
        offload_device=torch.device("cpu"),
        hook_backup={},
        cached_patcher_init=None,
    )
    return found


def _kind_of(base: type, *, is_sharded: bool) -> type:
    """ComfyUI asks how many prompts fit into one call: the planner has answered that."""
    members: dict[str, Any] = {
        "__module__": base.__module__,
        "get_free_memory": lambda self, device: sys.maxsize,
        "load": _outside_inference_mode("load"),
        "unpatch_model": _outside_inference_mode("unpatch_model"),
    }
    if is_sharded:
        members |= {
            "load": _load_sharded,
            "pin_weight_to_device": lambda self, key: None,
            "patch_hook_weight_to_device": _refuse_hook,
        }
    return type(base.__name__, (base,), members)


def _outside_inference_mode(name: str) -> Callable[..., Any]:
    """ComfyUI's method where quantised parameters can be made anew."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        from comfy.model_patcher import ModelPatcher

        with torch.inference_mode(False), torch.no_grad():
            return getattr(ModelPatcher, name)(self, *args, **kwargs)

    return method


def _refuse_hook(self: Any, hooks: Any, combined_patches: Any, key: str, *others: Any, **named: Any) -> None:
    raise RequestError(
        f"Hooks of prompts change {key}, which shard_weights cannot; set shard_weights to off."
    )


def _load_sharded(
    self: Any,
    device_to: Any = None,
    lowvram_model_memory: int = 0,
    force_patch_weights: bool = False,
    full_load: bool = False,
) -> None:
    """Weights are whole in their block's turn only, so they are patched then, as ComfyUI patches offloaded ones."""
    from comfy.model_patcher import ModelPatcher

    for key in self.patches:
        path, _, name = key.rpartition(".")
        if name not in _OWNED or not hasattr(self.model.get_submodule(path), "comfy_cast_weights"):
            raise RequestError(f"a LoRA changes {key}, which shard_weights cannot; set shard_weights to off")
    ModelPatcher.load(self, device_to, 0, False, False)
