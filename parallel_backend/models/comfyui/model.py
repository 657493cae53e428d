"""One of ComfyUI's own models in a rank: its module, and the patcher through which ComfyUI changes its weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..base import Rotate, WeightChunks, WeightSharding
from ..tokens.regions import Region
from ..tokens.table import TABLE, slices_layers
from .attention_router import is_replaced
from .file_weights import FileWeights
from .formats.slices import Cut, can_be_cut, is_plain
from .rotary_router import can_route, rotary_by


@dataclass(eq=False)
class ComfyUIModel(WeightChunks):
    """A base.ModuleModel of ComfyUI's. `patcher`: ComfyUI's ModelPatcher; `bytes`, `stored_dtype`: size and most common
    dtype of its tensors in the file; `originals`: parameters over the mapped file in the file's dtypes, by their names
    in ComfyUI's BaseModel; `files`: loads them again, None if the rank has a part of the model; `cuts`: this rank's cut
    of each parameter that tensor parallelism slices, by the names of `originals`."""

    patcher: Any
    device: torch.device
    bytes: int
    stored_dtype: str
    originals: Mapping[str, Tensor]
    byte_sharding: WeightSharding | None
    files: FileWeights | None
    cuts: Mapping[str, Cut]

    def __post_init__(self) -> None:
        entry = TABLE.get(type(self.module).__name__)  # looked up now: a node may change the module's class
        self.regions: tuple[Region, ...] = () if entry is None else entry.regions
        self.inseparable_rows = entry is not None and entry.inseparable_rows

    @property
    def splits_layers(self) -> bool:
        return slices_layers(type(self.module).__name__)

    @property
    def module(self) -> nn.Module:
        return self.patcher.model.diffusion_model

    @property
    def compute_dtype(self) -> torch.dtype:
        model = self.patcher.model
        return model.get_dtype() if model.manual_cast_dtype is None else model.manual_cast_dtype

    @cached_property
    def scales_by_largest(self) -> bool:
        return any(map(_scales_by_largest, self.module.modules()))

    @property
    def attention(self) -> str:
        """ComfyUI's name of its optimized attention, by its command line and packages: sage, pytorch, …"""
        from comfy.ldm.modules import attention

        return str(attention.optimized_attention.__name__).removeprefix("attention_")

    def leave_device(self) -> None:
        if self.files is not None:
            self.files.leave()

    def come_back(self) -> None:
        if self.files is not None:
            self.files.come_back()

    def attention_is_replaced(self) -> bool:
        return is_replaced()

    def begin_call(self) -> None:
        if (forget := getattr(self.module, "clear_kv_cache", None)) is not None:
            forget()  # it finds references by memory address, and copies of another call may have the same

    def rotary_by(self, rotate: Rotate) -> AbstractContextManager[None]:
        return rotary_by(rotate)

    def gives_rows(self, layer: nn.Module) -> bool:
        """False if ComfyUI's functions change the weight on use, or if its format has more than one scale; see
        base.ModuleModel.gives_rows."""
        if type(layer).__module__ != "comfy.ops" or hasattr(layer, "_v") or not can_route():
            return False
        if getattr(layer, "weight_function", None) or getattr(layer, "bias_function", None):
            return False
        weight = layer._parameters.get("weight")
        return weight is not None and can_be_cut(weight)

    def weight_rows(self, weight: Tensor, rows: slice) -> Tensor:
        return Cut(0, (rows,)).of(weight)

    def multiplies(self, layer: nn.Module, x: Tensor) -> bool:
        weight: Any = layer.weight
        here = is_plain(weight) and weight.device == x.device and weight.dtype == x.dtype
        is_own = type(layer).forward.__module__ == "comfy.ops"
        return here and is_own and not getattr(layer, "comfy_cast_weights", True)


def _scales_by_largest(layer: nn.Module) -> bool:
    """Returns True for a layer that quantises its input without a scale from the file."""
    quantised = getattr(layer, "layout_type", None) is not None
    multiplies = quantised and not getattr(layer, "_full_precision_mm", True)
    return multiplies and getattr(layer, "input_scale", None) is None
