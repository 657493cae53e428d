"""Counts for calls of ComfyUI's Wan, in a tiny size, on the meta device. Needs ComfyUI at COMFYUI_PATH."""

from __future__ import annotations

import torch

from comfy_modules import import_comfyui_here
from dispatch_counter import Counts, counted
from module_devices import as_in_a_rank, comfyui_on_the_device, forward_of, on_device
from parallel_backend.models.comfyui.tiny.cases import TinyModel, build_tiny, tiny_inputs
from parallel_backend.requests import BLOCK, STAY, ModuleCall
from parallel_backend.strategy import ParallelStrategy

MODES = {"wan_stay": STAY, "wan_block": BLOCK}
LAYERS = (2, 4)


def module_call(tokens: str, layers: int) -> Counts:
    """Returns the counts of one call of a Wan with `layers` blocks, on the first of two Ulysses ranks."""
    import_comfyui_here()
    model = TinyModel(build_tiny("wan"))
    model.module.blocks = model.module.blocks[:layers]
    args, kwargs = tiny_inputs("wan")(1, 16, 16)
    args, kwargs = as_in_a_rank(args, kwargs | {"transformer_options": {}})
    call = ModuleCall(args, kwargs, 1, tokens)
    with (
        forward_of(on_device(model), ParallelStrategy(ulysses_degree=2), 0) as forward,
        comfyui_on_the_device(),
        torch.inference_mode(),
        counted() as counter,
    ):
        forward(call)
    return counter.counts
