"""Samplings of ComfyUI's for tiny models: how latents and noise mix, apart from what a file's own model would have."""

from __future__ import annotations

from typing import Any

from torch import nn

from comfy_modules import import_comfyui_here


def sampling_of(schedule: str, kind: str, **values: Any) -> nn.Module:
    """By the names that classes have in comfy.model_sampling. `values`: set on it."""
    import_comfyui_here()
    import comfy.model_sampling as known

    found = type("ModelSampling", (getattr(known, schedule), getattr(known, kind)), {})()
    for name, value in values.items():
        setattr(found, name, value)
    return found
