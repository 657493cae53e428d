"""ComfyUI's samplings (the mix of latent and noise) for tiny models, in place of the one that a file's model has."""

from __future__ import annotations

from typing import Any

from torch import nn

from comfy_modules import import_comfyui_here


def sampling_of(schedule: str, kind: str, **values: Any) -> nn.Module:
    """Returns a sampling made of two classes of comfy.model_sampling, by their names. `values`: its attributes."""
    import_comfyui_here()
    import comfy.model_sampling as known

    found = type("ModelSampling", (getattr(known, schedule), getattr(known, kind)), {})()
    for name, value in values.items():
        setattr(found, name, value)
    return found
