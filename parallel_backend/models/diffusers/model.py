"""diffusers' Flux.1 in a rank as a ModuleModel, the engine's interface to any module."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..base import Rotate, WeightChunks, WeightSharding
from ..tokens.regions import Region
from ..tokens.table import entry_of
from .adapter import DiffusersFlux
from .casting import CastingLinear
from .compat_diffusers import rotary_by


@dataclass(frozen=True)
class DiffusersModel(WeightChunks):
    """A base.ModuleModel. `bytes`, `stored_dtype`: of the tensors in the file."""

    module: DiffusersFlux
    device: torch.device
    bytes: int
    stored_dtype: str
    compute_dtype: torch.dtype
    byte_sharding: WeightSharding | None = None

    attention: ClassVar[str] = "pytorch"
    splits_layers: ClassVar[bool] = True
    inseparable_rows: ClassVar[bool] = False
    scales_by_largest: ClassVar[bool] = False

    @property
    def regions(self) -> tuple[Region, ...]:
        entry = entry_of(type(self.module).__name__)
        assert entry is not None, "the table has a row for it"
        return entry.regions

    def leave_device(self) -> None:
        pass

    def come_back(self) -> None:
        pass

    def attention_is_replaced(self) -> bool:
        return False

    def begin_call(self) -> None:
        pass

    def rotary_by(self, rotate: Rotate) -> AbstractContextManager[None]:
        return rotary_by(rotate)

    def gives_rows(self, layer: nn.Module) -> bool:
        return type(layer) in (nn.Linear, CastingLinear)  # Fp8Linear needs sides that are multiples of 16

    def weight_rows(self, weight: Tensor, rows: slice) -> Tensor:
        return weight[rows]

    def multiplies(self, layer: nn.Module, x: Tensor) -> bool:
        return type(layer) is nn.Linear and layer.weight.dtype == x.dtype
