"""A rank's model, whatever its provider (registry.py): a module, and what the engine needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .tokens.regions import Region


# Attention as ComfyUI's models call it, after ComfyUI's own function: (original, q, k, v, heads, mask=None, …).
AttentionCall = Callable[..., Tensor]

# The rotation of queries or keys by their tokens' places: (apply, tensors, by, dim of the heads in a tensor) -> rotated
# tensors. `apply(tensors, by)` is the library's own.
Rotate = Callable[[Callable[[list[Tensor], Any], list[Tensor]], list[Tensor], Any, int], list[Tensor]]


@dataclass(frozen=True)
class Slices:
    """Slice `index` of `degree` of each layer. Where ranks meet: `add_up` gives every rank the sum of what each hands
    in (in place), `join` puts [B, n] of each next to each other as [B, degree * n]."""

    degree: int
    index: int
    add_up: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


class WeightSharding(Protocol):
    """Shares out weights over ranks as bytes, in any format; ranks that share them make the same calls together."""

    @property
    def shares(self) -> nn.Module:
        """The memory of what this rank keeps."""

    def shard(
        self, module: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Leaves each rank its share of the parameters of a module in host memory, which the file is mapped into.

        Those of `blocks` are gathered for the turn of each, all others for a whole call. `dtypes`: which parameters are
        to have, by name, where not the file's.
        """

    def call(self) -> AbstractContextManager[None]:
        """Around every call of the module, of whichever method."""

    def rest(self) -> None:
        """The blocks that this call still comes to compute nothing. All ranks say so at the same block."""


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank loads.

    `stage`: number of its pipeline stage; `stage_shares`: how much of the blocks each stage takes;
    `slices`: its slice of each layer, None for whole layers; `byte_sharding`: leaves it some bytes of each block.
    """

    stage: int = 0
    stage_shares: tuple[float, ...] = (1.0,)
    slices: Slices | None = None
    byte_sharding: WeightSharding | None = None


class ModuleModel(Protocol):
    """A module that the ranks of a strategy call together, with the arguments that one device would have given it.

    `module`: ComfyUI's diffusion model, or diffusers' with its signature; `regions`: which arguments of its blocks are
    tokens (models/tokens/regions.py), empty where nobody knows: then it can only be given fewer rows.
    """

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters are this rank's weights."""

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes(self) -> int:
        """All that the whole model reads from its file."""

    @property
    def stored_dtype(self) -> str:
        """torch's name of the dtype of most of the file."""

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def regions(self) -> tuple[Region, ...]: ...

    @property
    def inseparable_rows(self) -> bool:
        """Whether its module takes rows by their place among all, so that they cannot be apart."""

    @property
    def scales_by_largest(self) -> bool:
        """Whether quantised layers scale what they compute on by its largest value, which is another one for fewer rows
        or tokens."""

    @property
    def splits_layers(self) -> bool:
        """True if its provider can load a slice of each layer (ModelPart.slices)."""

    @property
    def byte_sharding(self) -> WeightSharding | None:
        """The way to gather weights where each rank has a share of them; None where it has them all."""

    @property
    def attention(self) -> str:
        """What its blocks call as ComfyUI's optimized attention, by ComfyUI's name for it."""

    def leave_device(self) -> None:
        """Gives back the memory of weights that come_back() reads from the file again. Others stay on the device."""

    def come_back(self) -> None: ...

    def begin_call(self) -> None:
        """Forgets what the module keeps of its last call by where that lay in memory."""

    def rotary_by(self, rotate: Rotate) -> AbstractContextManager[None]:
        """Inside, `rotate` answers what its blocks call to rotate queries and keys."""

    def gives_rows(self, layer: nn.Module) -> bool:
        """True for a linear layer or a norm that gives some of its outputs if its weight and bias are `weight_rows` of
        them."""

    def weight_rows(self, weight: Tensor, rows: slice) -> Tensor:
        """Returns those rows of a layer's weight or bias, in the same memory."""

    def multiplies(self, layer: nn.Module, x: Tensor) -> bool:
        """True for a linear layer that does nothing to `x` but multiply it by its weight and add its bias."""
