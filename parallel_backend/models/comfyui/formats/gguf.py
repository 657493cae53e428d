"""GGUF files for ComfyUI's own modules: weights stay packed, as views of the mapped file, and unpack as they are used.

A packed weight is one of ComfyUI's quantised tensors in a layout of its own (gguf_layout.py): whatever those can do,
such as moving, lying shared out over ranks or telling their true shape, it can.
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

LAYOUT = f"{__package__}.gguf_layout"  # imported where packed weights are: it takes a second, and newer ComfyUIs alone
_UNPACKED = torch.float16  # what a packed tensor unpacks to until its module wants another dtype
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
assert _PLAIN.keys() == PLAIN.keys()


def outline(path: str) -> dict[str, Tensor]:
    """The tensors of a file by name: packed ones as empty ones on the meta device, of their true shape."""
    return {
        tensor.name: _plain(tensor)
        if tensor.kind in _PLAIN
        else torch.empty(tensor.shape, dtype=_UNPACKED, device="meta")
        for tensor in read_tensors(path)
    }


def mapped(path: str) -> dict[str, Tensor]:
    """The tensors of a file by name, read from disk when something touches them. Raises CheckpointError."""
    return {
        tensor.name: _plain(tensor) if tensor.kind in _PLAIN else _packed(tensor, path)
        for tensor in read_tensors(path)
    }


def unpack_as(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Has packed parameters of a module unpack to what it was built with, by name."""
    for name, parameter in list(module.named_parameters()):
        if is_packed(parameter) and name in dtypes:
            owner, _, own = name.rpartition(".")
            value = _layout().unpacking_to(parameter, dtypes[name])
            setattr(module.get_submodule(owner), own, nn.Parameter(value, requires_grad=False))


def is_packed(tensor: Tensor) -> bool:
    return LAYOUT in sys.modules and _layout().is_packed(tensor)


def format_of(tensor: Tensor) -> str:
    """As models/dtypes.py calls it."""
    return _layout().kind_of(tensor) if is_packed(tensor) else str(tensor.dtype).removeprefix("torch.")


def unpacked(tensor: Tensor) -> Tensor:
    """What a change starts from: nothing packs it again, so changed weights stay unpacked."""
    return tensor.dequantize() if is_packed(tensor) else tensor


def _plain(tensor: GGUFTensor) -> Tensor:
    return _mapped_bytes(tensor).view(_PLAIN[tensor.kind]).view(tensor.shape)


def _packed(tensor: GGUFTensor, path: str) -> Tensor:
    try:
        layout = _layout()
        _ = import_module("comfy.model_patcher").CoreModelPatcher  # without it loaders copy weights
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
        warnings.simplefilter("ignore")  # the mapping is read-only; nobody writes there
        return torch.from_numpy(tensor.data)
