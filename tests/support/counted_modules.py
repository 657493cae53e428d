"""Calls of a tiny Wan of ComfyUI's own on the meta device, counted. Needs ComfyUI at COMFYUI_PATH."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from comfy_modules import import_comfyui_here
from dispatch_counter import DEVICE, Counts, counted, world_of_one_process
from parallel_backend.engine.attention.uneven import UnevenAttention
from parallel_backend.engine.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.models.comfyui.tiny import video
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.requests import BLOCK, STAY, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy

MODES = {"wan_stay": STAY, "wan_block": BLOCK}
LAYERS = (2, 4)


def module_call(tokens: str, layers: int) -> Counts:
    """One call of a Wan with so many blocks on the first of two ranks of Ulysses."""
    import_comfyui_here()
    from comfy.ldm.modules.attention import attention_pytorch

    attend = UnevenAttention.__call__

    def as_on_a_gpu(self: UnevenAttention, original: object, *args: Any, **kwargs: Any) -> Tensor:
        return attend(self, attention_pytorch, *args, **kwargs)

    with (
        world_of_one_process(0, 2) as world,
        patch.object(UnevenAttention, "__call__", as_on_a_gpu),  # on the CPU ComfyUI chooses another function
    ):
        model = TinyModel(video.wan())
        model.module.blocks = model.module.blocks[:layers]
        model.module.to(DEVICE)
        forward = make_module_forward(model, Layouts(world), Placement(ParallelStrategy(ulysses_degree=2)))
        args, kwargs = _mapped(video.wan_inputs(1, 16, 16), lambda tensor: tensor.to(DEVICE))
        call = ModuleCall(args, kwargs | {"transformer_options": {}}, 1, tokens)
        with torch.inference_mode(), counted() as counter:
            forward(call)
    return counter.counts


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value
