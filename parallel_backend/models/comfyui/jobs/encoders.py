"""Text encoders of ComfyUI's own, as a job has them run in a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def call_encoder(patcher: Any, path: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the answer of `method` of the encoder's module at `path`, or of the module itself where it is "". Its
    weights are as `patcher` has patched them, with the LoRAs of the prompt's hooks."""
    from comfy.model_management import load_models_gpu

    estimate = getattr(patcher.model, "memory_estimation_function", None)
    memory = 0 if estimate is None or path or not args else estimate(args[0], device=patcher.load_device)
    hooks, patcher.current_hooks = patcher.current_hooks, None  # loading puts in all that were forced
    load_models_gpu([patcher], memory_required=memory)
    patcher.patch_hooks(hooks)
    try:
        module = patcher.model.get_submodule(path)
        return (getattr(module, method) if method else module)(*args, **kwargs)
    finally:
        patcher.unpatch_hooks()


def offload_encoders(device: torch.device, modules: Sequence[nn.Module]) -> None:
    """Moves what lies of `modules` on the device to host memory."""
    from comfy.model_management import current_loaded_models, free_memory

    kept = [
        one
        for one in current_loaded_models
        if one.model is None or all(one.model.model is not module for module in modules)
    ]
    if len(kept) < len(current_loaded_models):
        free_memory(1e32, device, keep_loaded=kept)
