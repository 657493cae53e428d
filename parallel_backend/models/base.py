"""A rank's model from any provider (registry.py): a module, and what the engine needs to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .tokens.regions import Region


# Rotates queries or keys by the positions of their tokens (RoPE): (apply, tensors, by, dim of the heads in a tensor) ->
# rotated tensors. `by`: the frequencies; `apply(tensors, by)`: the library's own rotation.
Rotate = Callable[[Callable[[list[Tensor], Any], list[Tensor]], list[Tensor], Any, int], list[Tensor]]


@dataclass(frozen=True)
class Slices:
    """Slice number `index` of `degree` of each layer, with two collectives. `add_up`: all-reduces by sum, in place;
    `join`: all-gathers the [B, n] of each rank to [B, degree * n]."""

    degree: int
    index: int
    add_up: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]


class WeightSharding(Protocol):
    """Shards weights of any format over ranks, as bytes (engine/sharding.ByteSharding). All ranks that share weights
    make the same calls, except of `put`."""

    @property
    def shares(self) -> nn.Module: ...

    def shard(
        self, module: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]
    ) -> None: ...

    def call(self) -> AbstractContextManager[None]: ...
    def show_shapes(self, shapes: Mapping[str, Sequence[int]]) -> None: ...
    def keeps(self, name: str) -> bool: ...
    def put(self, name: str, value: Tensor) -> None: ...
    def rest(self) -> None: ...


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank loads.

    `stage`: number of its pipeline stage; `stage_shares`: relative size of each stage;
    `slices`: its slice of each layer, None for whole layers; `byte_sharding`: shards the bytes of each block, or None.
    """

    stage: int = 0
    stage_shares: tuple[float, ...] = (1.0,)
    slices: Slices | None = None
    byte_sharding: WeightSharding | None = None


class ModuleModel(Protocol):
    """A module that all ranks call with the arguments that it would get on one device.

    `module`: ComfyUI's diffusion model, or diffusers' behind the same signature; `bytes`: of all tensors that the whole
    model reads from its file, most of them of the dtype `stored_dtype` (torch's name); `byte_sharding`: gathers weights
    that are sharded over ranks, None if this rank has all weights; `regions`: which arguments of its blocks are tokens
    (models/tokens/regions.py), empty if unknown: ranks then split its rows or its attention only.
    """

    device: torch.device
    bytes: int
    stored_dtype: str
    byte_sharding: WeightSharding | None

    @property
    def chunks(self) -> tuple[nn.Module, ...]:
        """The modules whose parameters are this rank's weights."""

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def regions(self) -> tuple[Region, ...]: ...

    @property
    def inseparable_rows(self) -> bool:
        """True if its module treats rows by their position in the batch, so that ranks cannot split the rows."""

    @property
    def scales_by_largest(self) -> bool:
        """True if quantised layers scale their input by its largest value, which differs if a rank has fewer rows or
        tokens."""

    @property
    def splits_layers(self) -> bool:
        """True if its provider can load a slice of each layer (ModelPart.slices)."""

    @property
    def attention(self) -> str:
        """ComfyUI's name of the attention function that its blocks call (sage, pytorch, …)."""

    def leave_device(self) -> None:
        """Frees the memory of weights that come_back() can read from the file again. Others stay on the device."""

    def come_back(self) -> None: ...

    def attention_is_replaced(self) -> bool:
        """Returns True while a node's code has put a function of its own in the place of the one that blocks call."""

    def begin_call(self) -> None:
        """Clears what the module caches of its last call by memory address."""

    def rotary_by(self, rotate: Rotate) -> AbstractContextManager[None]:
        """Makes `rotate` answer the calls by which its blocks rotate queries and keys, in the `with` block."""

    def gives_rows(self, layer: nn.Module) -> bool:
        """Returns True for a linear layer or norm that computes some of its outputs if its weight and bias are replaced
        by their `weight_rows`."""

    def weight_rows(self, weight: Tensor, rows: slice) -> Tensor:
        """Returns `rows` of a layer's weight or bias, as a view."""

    def multiplies(self, layer: nn.Module, x: Tensor) -> bool:
        """Returns True for a linear layer that only multiplies `x` by its weight and adds its bias."""


def find_module(module: nn.Module, path: str) -> Any:
    """Returns the module at `path` inside a module, or None if it has none there."""
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


class WeightChunks:
    """A base of models that gives `chunks`. If weights are sharded, the buffers remain in the module."""

    @property
    def chunks(self: ModuleModel) -> tuple[nn.Module, ...]:
        return (self.module,) if self.byte_sharding is None else (self.module, self.byte_sharding.shares)
