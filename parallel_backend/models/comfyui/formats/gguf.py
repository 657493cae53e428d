"""GGUF files for ComfyUI's own modules: weights stay packed, as views of the mapped file, and unpack on use.

A packed weight is a quantised tensor of ComfyUI's with its own layout (gguf_layout.py). So it can move between devices,
be sharded over ranks and report its true shape.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import CheckpointError
from ...gguf_file import PLAIN, GGUFTensor, read_tensors

LAYOUT = f"{__package__}.gguf_layout"  # imported only for packed weights: takes a second and a newer ComfyUI
_UNPACKED = torch.float16  # dtype to unpack to, until the module sets another one


def outline(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a file by name. Packed ones are on the meta device, with their true shape."""
    return {
        tensor.name: _plain(tensor)
        if tensor.kind in PLAIN
        else torch.empty(tensor.shape, dtype=_UNPACKED, device="meta")
        for tensor in read_tensors(path)
    }


def mapped(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, which are read from disk on use. Raises CheckpointError."""
    return {
        tensor.name: _plain(tensor) if tensor.kind in PLAIN else _packed(tensor, path)
        for tensor in read_tensors(path)
    }


def unpack_as(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Makes packed parameters of a module unpack to these dtypes, by name."""
    for name, parameter in list(module.named_parameters()):
        if is_packed(parameter) and name in dtypes:
            owner, _, own = name.rpartition(".")
            value = _layout().unpacking_to(parameter, dtypes[name])
            setattr(module.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))


def is_packed(tensor: Tensor) -> bool:
    return LAYOUT in sys.modules and _layout().is_packed(tensor)


def unpacked(tensor: Tensor) -> Tensor:
    """Returns the tensor unpacked, in order to change it: nothing can pack it again."""
    return tensor.dequantize() if is_packed(tensor) else tensor


def _plain(tensor: GGUFTensor) -> Tensor:
    return _mapped_bytes(tensor).view(getattr(torch, PLAIN[tensor.kind])).view(tensor.shape)


def _packed(tensor: GGUFTensor, path: str) -> Tensor:
    try:
        layout = _layout()
        _ = import_module("comfy.model_patcher").CoreModelPatcher  # older loaders copy weights
    except (ImportError, AttributeError):
        raise CheckpointError(
            f"{path} holds packed weights (GGUF), for which this ComfyUI is too old. Update ComfyUI."
        ) from None
    found: Tensor = layout.packed(_mapped_bytes(tensor), tensor.kind, tensor.shape, _UNPACKED)
    return found


def _layout() -> Any:
    return import_module(LAYOUT)


def _mapped_bytes(tensor: GGUFTensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory; nothing writes to it
        return torch.from_numpy(tensor.data)
