"""A module of ComfyUI's without its weights: the same structure with every parameter on the meta device.

Nodes and ComfyUI's BaseModel read sizes, dtypes, patchifiers and names of parameters from it. It computes nothing:
what calls a part of it would compute with weights that are not there, and is told so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ...parallel_backend.job.pickling import LOADED_STATE
from .unsupported import refusal

# Larger buffers are weights by another name.
_SMALL = 1 << 20  # bytes
# What LoRAs have put beside the weights of a module that was loaded.
_FUNCTIONS = ("weight_function", "bias_function")
_LOWVRAM = "_lowvram_function"


def shadow_of(module: nn.Module) -> nn.Module:
    """A copy without weights; parameters that were one are one in it. Raises RequestError for a module with hooks."""
    return _shadow(module, {}, {}, "")


def _shadow(
    module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, Tensor], name: str
) -> nn.Module:
    if id(module) in modules:
        return modules[id(module)]
    if module._forward_hooks or module._forward_pre_hooks:
        raise refusal(f"a hook on part of the network ({name or 'the whole of it'})")
    shadow = type(module).__new__(type(module))
    modules[id(module)] = shadow
    state = without_loaded_state(module.__dict__)
    state["_parameters"] = {key: _outline(value, tensors) for key, value in module._parameters.items()}
    state["_buffers"] = {
        key: value.detach().cpu() if _is_small(value) else _outline(value, tensors)
        for key, value in module._buffers.items()
    }
    state["_modules"] = {
        key: None if child is None else _shadow(child, modules, tensors, f"{name}.{key}".removeprefix("."))
        for key, child in module._modules.items()
    }
    if name:
        state["_forward_pre_hooks"] = OrderedDict({0: _refuse_to_compute})
    shadow.__dict__.update(state)
    return shadow


def without_loaded_state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's own, as before ComfyUI's memory manager and LoRAs have put theirs beside its weights."""
    state = {
        key: value
        for key, value in attributes.items()
        if key not in LOADED_STATE and not key.endswith(_LOWVRAM)
    }
    return state | {key: [] for key in _FUNCTIONS if key in state}


def _is_small(buffer: Tensor | None) -> bool:
    return buffer is not None and not buffer.is_meta and buffer.nbytes <= _SMALL


def _outline(tensor: Tensor | None, known: dict[int, Tensor]) -> Tensor | None:
    """Its shape and dtype; a quantised one's as it computes."""
    if tensor is None:
        return None
    if id(tensor) not in known:
        outline: Tensor = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            outline = nn.Parameter(outline, requires_grad=False)
        known[id(tensor)] = outline
    return known[id(tensor)]


def _refuse_to_compute(module: nn.Module, args: tuple) -> NoReturn:
    raise refusal(
        f"a node that computes with part of the network itself ({type(module).__name__}), whose weights are on the "
        f"devices"
    )
