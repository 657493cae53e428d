"""The numbers of tiny models: ComfyUI's arguments to build one for the CPU, random weights, random inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# (args, kwargs) of a call of a module.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def operations() -> dict[str, Any]:
    """Returns the last arguments of ComfyUI's modules: float32 on the CPU, with uninitialised weights."""
    import comfy.ops

    return {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


def fill(model: nn.Module, seed: int = 7) -> nn.Module:
    """Sets random weights with which every input changes the output."""
    g = torch.Generator().manual_seed(seed)
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        if not torch.is_floating_point(p) or p.numel() == 0:
            continue
        r = torch.randn(p.shape, generator=g)
        if p.ndim > 1:
            p.data.copy_(r * (0.8 / max(1, p[0].numel()) ** 0.5))
        elif "norm" in name and name.endswith(("weight", "scale")):
            p.data.copy_(1 + 0.2 * r)
        else:
            p.data.copy_(0.2 * r)
    return model.eval().requires_grad_(False)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Returns random numbers, which are equal in every process for the same shape and seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
